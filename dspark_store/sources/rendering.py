"""A tokenizer and its chat template as one thing: conversations to text, text to tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.messages import Message, fold_system_message
from dspark_store.sources.source import SourceError
from dspark_store.sources.template import (
    RENDER_ERRORS,
    has_generation_tags,
    refuses_system_role,
    require_chat_template,
)

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

type Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text, none added and none cut.

    Attributes:
        ids: int32, shape (length,).
        encoding: what the tokenizer's fast backend says about where in the text they are; None if it has none.

    """

    ids: NDArray[np.int32]
    encoding: "Encoding | None"


@dataclass(slots=True)
class TemplateMemory:
    """What a template writes around contents, by roles: it spares rendering each conversation several times.

    Attributes:
        openings: before the first content, by its role.
        gaps: between two contents, by their roles; and where in it the first message ends.
        closings: behind the last content, by its role.
        headers: before a content, by the role of the message before and its own, and whether there are tools.

    """

    openings: dict[str, str] = field(default_factory=dict)
    gaps: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    closings: dict[str, str] = field(default_factory=dict)
    headers: dict[tuple[str, str, bool], str] = field(default_factory=dict)


class Renderer:
    """Renders conversations with the tokenizer's chat template and tokenises the result.

    Attributes:
        eos_token: the text of the EOS token.
        generation_prompt: what the template writes to have the assistant speak; "" if it has no such prompt.
        memory: what was learned from one conversation and holds for the next (see `turns`).

    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Look at the template once.

        Args:
            tokenizer: with a chat template.
            template_kwargs: variables for the template in every render; those of a conversation win over them.

        Raises:
            SourceError: the tokenizer has no chat template, or it is not valid Jinja.

        """
        from transformers.utils.chat_template_utils import render_jinja_template

        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self._render_jinja: Any = render_jinja_template
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._has_offsets = bool(tokenizer.is_fast)
        self.eos_token: str | None = tokenizer.eos_token if isinstance(tokenizer.eos_token, str) else None
        self._templates: dict[bool, str] = {}
        self._refuse_broken_templates()
        self._folds_system_message = refuses_system_role(tokenizer)
        self.generation_prompt = self._generation_prompt()
        self.memory = TemplateMemory()

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template can take them.

        A system message that it refuses goes to the first user, and keys whose value is null are left out.
        """
        messages = fold_system_message(messages) if self._folds_system_message else messages
        return [{key: value for key, value in message.items() if value is not None} for message in messages]

    def supervises_by_tags(self, tools: list[JsonValue] | None) -> bool:
        """Tell whether the template for conversations with these tools has generation tags."""
        return has_generation_tags(self._template(bool(tools)))

    def render(
        self,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        template_kwargs: Mapping[str, JsonValue] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; "" for no messages.

        Raises:
            SourceError: the template refuses the conversation, or the text is not Unicode that can be encoded.

        """
        if not messages:
            return ""
        texts, _ = self._rendered(messages, tools, template_kwargs, add_generation_prompt=generation_prompt)
        return _encodable(texts[0])

    def render_tagged(
        self,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the stretches of it inside the template's generation tags."""
        texts, spans = self._rendered(messages, tools, template_kwargs, return_assistant_tokens_mask=True)
        return _encodable(texts[0]), [(int(start), int(stop)) for start, stop in spans[0]]

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

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: list[JsonValue] | None,
        template_kwargs: Mapping[str, JsonValue] | None,
        **options: bool,
    ) -> tuple[list[str], list[list[Span]]]:
        try:
            texts, spans = self._render_jinja(
                [list(messages)],
                tools=tools,
                chat_template=self._template(bool(tools)),
                **options,
                **{**self._variables, **(template_kwargs or {})},
            )
        except RENDER_ERRORS as error:
            raise SourceError(f"the chat template refuses the conversation: {_one_line(error)}") from error
        return texts, spans

    def _template(self, with_tools: bool) -> str:
        if with_tools not in self._templates:
            try:
                template = self.tokenizer.get_chat_template(tools=[{}] if with_tools else None)
            except ValueError as error:
                raise SourceError(f"no chat template for this use: {_one_line(error)}") from error
            self._templates[with_tools] = template
        return self._templates[with_tools]

    def _refuse_broken_templates(self) -> None:
        template = self.tokenizer.chat_template
        for text in template.values() if isinstance(template, dict) else [template]:
            has_generation_tags(str(text))

    def _generation_prompt(self) -> str:
        user: list[Message] = [{"role": "user", "content": "a"}]
        try:
            text, prompted = self.render(user, None), self.render(user, None, generation_prompt=True)
        except SourceError:
            return ""
        if not prompted.startswith(text) and self.eos_token:
            text = text.removesuffix(self.eos_token)  # some templates end a text that is not to be gone on with
        return prompted.removeprefix(text) if prompted.startswith(text) else ""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"character {error.start} of the rendered text is half of a surrogate pair") from error
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
