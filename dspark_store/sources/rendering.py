"""A tokenizer and its chat template as one thing: conversations to text, text to tokens."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.limits import (
    DEFAULT_LIMITS,
    ProcessorTimeError,
    RenderLimitError,
    RenderLimits,
    TextLimitError,
    run_limited,
)
from dspark_store.sources.marks import Span
from dspark_store.sources.messages import Conversation, Message, fold_system_message
from dspark_store.sources.seams import TemplateMemory
from dspark_store.sources.source import SourceError
from dspark_store.sources.template import (
    CLOCK,
    RENDER_ERRORS,
    Clock,
    LimitedTemplate,
    has_generation_tags,
    may_ask_clock,
    require_chat_template,
)

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

_KEPT = 8  # combinations of tools and variables whose seams are kept


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text, none added and none cut.

    Attributes:
        ids: int32, shape (length,).
        encoding: what the tokenizer's fast backend says about where in the text they are; None if it has none.

    """

    ids: NDArray[np.int32]
    encoding: "Encoding | None"


class Renderer:
    """Renders conversations with the tokenizer's chat template and tokenises the result.

    Attributes:
        eos_token: the text of the EOS token.

    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_kwargs: Mapping[str, JsonValue] | None = None,
        date: str | None = None,
        limits: RenderLimits = DEFAULT_LIMITS,
    ) -> None:
        """Look at the template once.

        Args:
            tokenizer: with a chat template.
            template_kwargs: variables for the template in every render; those of a conversation win over them.
            date: YYYY-MM-DD, what a template that asks the clock is told; None: today's.
            limits: what one row may take.

        Raises:
            SourceError: the tokenizer has no chat template, or it is not valid Jinja, or it does not end.

        """
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._job_kwargs = template_kwargs or {}
        self._clock = None if date is None else Clock(date)
        if self._clock is not None:
            self._variables[CLOCK] = self._clock
        self._has_offsets = bool(tokenizer.is_fast)
        self.eos_token: str | None = tokenizer.eos_token if isinstance(tokenizer.eos_token, str) else None
        self._special_tokens = sorted((text for text in tokenizer.get_added_vocab() if text), key=len, reverse=True)
        self._compiled: dict[bool, LimitedTemplate] = {}
        self._uses: dict[str, TemplateMemory] = {}
        for text in self._all_templates():
            has_generation_tags(text)  # which refuses a broken one
        self.limits = limits
        try:
            run_limited(self._look, limits.seconds)
        except ProcessorTimeError as error:
            raise SourceError(f"the chat template takes {error} to render one short message; does it end?") from error

    def _look(self) -> None:
        """Find out what the template does, with the job's variables and, as it may write earlier turns, without."""
        self._prompts = {self._generation_prompt(None)}
        variables = self._variables
        self._variables = {key: value for key, value in variables.items() if key not in self._job_kwargs}
        self._prompts.add(self._generation_prompt(None))
        user: Message = {"role": "user", "content": "a"}
        takes_user = self._takes(user)
        refused = [
            role
            for role in ("system", "developer")
            if takes_user and not self._takes({"role": role, "content": "b"}, user)
        ]
        self._folded_roles = refused if "system" in refused else []
        call: JsonValue = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
        answers: list[Message] = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant"}]
        self._needs_content = takes_user and any(
            not self._takes(user, said) and self._takes(user, {**said, "content": ""}) for said in answers
        )
        self._variables = variables

    def _takes(self, *messages: Message) -> bool:
        try:
            self.render(messages, None)
        except SourceError:
            return False
        return True

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template can take them.

        System messages that it refuses go to the next user, and keys whose value is null are left out.
        """
        messages = fold_system_message(messages, self._folded_roles) if self._folded_roles else messages
        empty: Message = {"content": ""} if self._needs_content else {}
        return [{**empty, **{key: value for key, value in one.items() if value is not None}} for one in messages]

    def supervises_by_tags(self, tools: list[JsonValue] | None) -> bool:
        """Tell whether the template for conversations with these tools has generation tags."""
        return self._compile(bool(tools)).has_generation_tags

    def use(self, tools: list[JsonValue] | None, template_kwargs: Mapping[str, JsonValue] | None) -> TemplateMemory:
        """Return what is known of the template with such tools and variables."""
        key = f"{bool(tools)} {json.dumps(template_kwargs, sort_keys=True)}" if template_kwargs else str(bool(tools))
        if key not in self._uses:
            while len(self._uses) >= _KEPT:
                self._uses.pop(next(iter(self._uses)))
            own = {self._generation_prompt(template_kwargs)} if template_kwargs else set()
            prompts = (own | self._prompts) - {""}
            self._uses[key] = TemplateMemory(sorted(prompts, key=len, reverse=True))
        return self._uses[key]

    def whole_special_tokens(self, text: str, place: int) -> int:
        """Return the place, or the end of the special token that it would divide."""
        for token in self._special_tokens:
            start = text.find(token, max(0, place - len(token) + 1))
            if 0 <= start < place:
                return start + len(token)
        return place

    def ends_special(self, text: str) -> bool:
        """Tell whether a text ends with a special token."""
        return any(map(text.endswith, self._special_tokens))

    def render(
        self,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        template_kwargs: Mapping[str, JsonValue] | None = None,
        *,
        generation_prompt: bool = False,
        tagged: list[Span] | None = None,
    ) -> str:
        """Return the text of a conversation; "" for no messages.

        Args:
            messages: as `prepare` gives them.
            tools: offered in it.
            template_kwargs: variables of the conversation.
            generation_prompt: end with what has the assistant speak.
            tagged: takes the stretches of the text inside the template's generation tags.

        Raises:
            SourceError: the template refuses the conversation, or the text is too long or not Unicode that can be
                encoded.

        """
        if not messages:
            return ""
        own = {"tools": tools, "documents": None, "add_generation_prompt": generation_prompt}
        variables = {**own, **self._variables, **(template_kwargs or {})}
        template = self._compile(bool(tools))
        try:
            text = template.render(messages, variables, tagged)
        except TextLimitError:
            raise
        except RENDER_ERRORS as error:
            raise SourceError(f"the chat template refuses the conversation: {_one_line(error)}") from error
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise SourceError(f"character {error.start} of the rendered text is half of a surrogate pair") from error
        if size > self.limits.text_bytes:
            raise TextLimitError(self.limits.text_bytes)
        return text

    def asks_clock(self, conversation: Conversation) -> bool:
        """Tell whether the template asks the clock for a conversation, which it may refuse; a date must be given."""
        if self._clock is None or not self.may_ask_clock:
            return False
        self._clock.asked = False
        with contextlib.suppress(SourceError):
            self.render(self.prepare(conversation.messages), conversation.tools, conversation.template_kwargs)
        return self._clock.asked

    @property
    def may_ask_clock(self) -> bool:
        """Whether some conversation can make the template ask the clock."""
        return any(map(may_ask_clock, self._all_templates()))

    @property
    def thinking_modes(self) -> list[dict[str, JsonValue]]:
        """The variables that make the template write each of its generation prompts."""
        thinks = any("enable_thinking" in text for text in self._all_templates())
        return [{"enable_thinking": mode} for mode in (True, False)] if thinks else [{}]

    def tokenise(self, texts: list[str]) -> list[Tokens]:
        """Tokenise rendered texts, all in one call of the tokenizer."""
        if not texts:
            return []
        encoded: Any = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        encodings = encoded.encodings if self._has_offsets else [None] * len(texts)
        return [
            Tokens(np.array(ids, dtype=np.int32), encoding)
            for ids, encoding in zip(encoded["input_ids"], encodings, strict=True)
        ]

    def _compile(self, with_tools: bool) -> LimitedTemplate:
        if with_tools not in self._compiled:
            try:
                template = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            except ValueError as error:
                raise SourceError(f"no chat template for this use: {_one_line(error)}") from error
            self._compiled[with_tools] = LimitedTemplate(template, self.limits.text_bytes)
        return self._compiled[with_tools]

    def _all_templates(self) -> list[str]:
        template = self.tokenizer.chat_template
        return [str(text) for text in (template.values() if isinstance(template, dict) else [template])]

    def _generation_prompt(self, template_kwargs: Mapping[str, JsonValue] | None) -> str:
        """Return what the template writes to have the assistant speak; "" if it has no such prompt."""
        user: list[Message] = [{"role": "user", "content": "a"}]
        try:
            text = self.render(user, None, template_kwargs)
            prompted = self.render(user, None, template_kwargs, generation_prompt=True)
        except SourceError:
            return ""
        if not prompted.startswith(text) and self.eos_token:
            text = text.removesuffix(self.eos_token)  # some templates end a text that is not to be gone on with
        return prompted.removeprefix(text) if prompted.startswith(text) else ""


class Rendering:
    """One conversation and its text, and renders of it that were changed.

    Attributes:
        messages: as the template can take them.
        text: their render.
        known: what is known of the template before the conversation.
        memory: that, and what is learned in it.

    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        template_kwargs: Mapping[str, JsonValue] | None,
        text: str,
    ) -> None:
        """Take a conversation that was rendered."""
        self.renderer, self.messages, self.text = renderer, messages, text
        self.known = renderer.use(tools, template_kwargs)
        self.memory = TemplateMemory(self.known.prompts, base=self.known)
        self._tools = tools
        self._template_kwargs = template_kwargs
        self._renders = 0

    def generation_prompts(self, messages: Sequence[Message]) -> list[str]:
        """Return what the template appends to these messages to have the assistant speak, in each mode of thinking.

        A first answer is prompted as it is behind a question. What changes the text before it is no such prompt.
        """
        messages = messages or [{"role": "user", "content": "a"}]
        before = self.attempt(messages)
        if before is None:
            return []
        texts = [self.attempt(messages, mode) or "" for mode in self.renderer.thinking_modes]
        return [text.removeprefix(before) for text in texts if text.startswith(before)]

    def render(self, messages: Sequence[Message], prompt: Mapping[str, JsonValue] | None = None) -> str:
        """Render other messages in the same way, or up to a generation prompt with more variables.

        Raises:
            RenderLimitError: there were too many renders of this conversation.
            SourceError: as `Renderer.render`.

        """
        self.expect(1)
        self._renders += 1
        variables = self._template_kwargs if prompt is None else {**(self._template_kwargs or {}), **prompt}
        return self.renderer.render(messages, self._tools, variables, generation_prompt=prompt is not None)

    def attempt(self, messages: Sequence[Message], prompt: Mapping[str, JsonValue] | None = None) -> str | None:
        """Do the same; None if the template refuses them."""
        try:
            return self.render(messages, prompt)
        except RenderLimitError:
            raise
        except SourceError:
            return None

    def expect(self, renders: int) -> None:
        """Raise RenderLimitError if so many renders are still to be made, and that would be too many."""
        if self._renders + renders > self.renderer.limits.renders:
            raise RenderLimitError(
                f"what the assistant said is found by more than {self.renderer.limits.renders:,} renders of the chat "
                "template; divide the row, or use a template with {% generation %} tags"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
