"""Chat templates: which one is meant, and what it can do."""

import datetime as dt
import json
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dspark_store.sources.limits import MAX_TEXT_BYTES, TextLimitError
from dspark_store.sources.marks import Span
from dspark_store.sources.messages import Message
from dspark_store.sources.source import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template is a program that runs on user data, so these are what a row that does not suit it can raise.
RENDER_ERRORS = (
    *(TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    MemoryError,
)
_MAX_BITS = 2**20  # of a number
_REASONING_READ = ("reasoning_content", "thinking", "reasoning")  # the first that a message has, as in transformers
CLOCK = "strftime_now"
"""By what name a template asks the clock."""

logger = logging.getLogger(__name__)


class LimitedTemplate:
    """A chat template, run as transformers 5.24 runs it whatever is installed, that stops at a size of its text.

    Attributes:
        environment: its own, so that changes of it are for this template alone.
        has_generation_tags: whether it marks what the assistant says.

    """

    def __init__(self, text: str, text_bytes: int = MAX_TEXT_BYTES) -> None:
        """Compile the text; SourceError if it is not valid Jinja."""
        self.environment: Any = _environment()
        self.environment.code_generator_class = _Generator
        self.environment.intercepted_binops = frozenset({"*", "**"})
        self.environment.binop_table = {**self.environment.binop_table, "*": _multiplied, "**": _raised}
        self._tag: Any = self.environment.extensions[_GenerationTag.identifier]
        self._template = _parsing(text, self.environment.from_string)
        self.has_generation_tags = has_generation_tags(text)
        self._text_bytes = text_bytes

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], tagged: list[Span] | None = None
    ) -> str:
        """Return the text of a conversation, and append the stretches inside of generation tags to `tagged`.

        Raises one of `RENDER_ERRORS`, or TextLimitError.
        """
        pieces: list[str] = []
        self._tag.length, self._tag.said = 0, [] if tagged is None else tagged
        for piece in self._template.generate(messages=[_with_aliases(message) for message in messages], **variables):
            self._tag.length += len(piece)
            if self._tag.length > self._text_bytes:
                raise TextLimitError(self._text_bytes)
            pieces.append(piece)
        return "".join(pieces)


def _with_aliases(message: Message) -> Message:
    """Give the reasoning of a message the names that templates read, whatever name it has."""
    reasoning = next((message[name] for name in _REASONING_READ if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _json_text(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _todays_clock(format: str) -> str:  # noqa: A002 - as templates name it
    return dt.datetime.now().strftime(format)  # noqa: DTZ005 - the date here


class _Dictionaries:
    """What a template has as `dict`: it makes dictionaries, and has none of the type's other methods."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *pairs: Any, **values: Any) -> dict[Any, Any]:  # noqa: ANN401 - what a template gives
        return dict(*pairs, **values)


class _Namespace(Namespace):
    """A namespace of a template; no name in it begins with an underscore, as Python's own do."""

    def __init__(*arguments: Any, **values: Any) -> None:  # noqa: ANN401 - a value may be called self
        own, *pairs = arguments
        Namespace.__init__(own)
        for name, value in dict(*pairs, **values).items():
            own[name] = value

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - what a template gives
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no place for {name!r}: its name begins with an underscore")
        super().__setitem__(name, value)


class _Generator(CodeGenerator):
    """Works out nothing when a template is compiled, where there are no limits."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def _multiplied(left: object, right: object) -> object:
    for sized, count in ((left, right), (right, left)):
        if isinstance(sized, str | list | tuple) and isinstance(count, int) and len(sized) * count > MAX_TEXT_BYTES:
            raise OverflowError(f"{len(sized):,} items {count:,} times are too many")
    _refuse_large(left, right, 1)
    return operator.mul(left, right)


def _raised(left: object, right: object) -> object:
    _refuse_large(left, 1, right)
    return operator.pow(left, right)


def _refuse_large(left: object, right: object, power: object) -> None:
    """Raise OverflowError if a product of whole numbers is one of too many digits."""
    if isinstance(left, int) and isinstance(right, int) and isinstance(power, int):
        bits = (abs(left).bit_length() + abs(right).bit_length()) * max(power, 1)
        if bits > _MAX_BITS:
            raise OverflowError("a number has too many digits")


def apply_chat_template_option(tokenizer: "PreTrainedTokenizerBase", value: str | PathLike[str] | None) -> None:
    """Set the tokenizer's chat template from what the user gave.

    Text that holds `{%` or `{{` is the template itself. The name of one of several templates that the tokenizer has
    is that one. A path to a file is replaced by the file's text or, if that is JSON with the key `chat_template`, by
    that entry. None keeps the tokenizer's own.

    Raises:
        SourceError: the value is neither, or it is None and the tokenizer has no template of its own.

    """
    if value is None:
        require_chat_template(tokenizer)
        return
    if isinstance(value, str) and _looks_like_jinja(value):
        tokenizer.chat_template = value
        return
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if value in named:
        tokenizer.chat_template = named[value]
        return
    path = Path(fspath(value))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"chat template {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise SourceError(
            f"chat template {str(path)!r} is neither a file that can be read nor Jinja "
            f"(it holds no {{% or {{{{){_names(named)}: {error.strerror or error}"
        ) from error
    template = _template_in(text)
    if not any(map(_looks_like_jinja, template.values() if isinstance(template, dict) else [template])):
        logger.warning("chat template %s holds no Jinja: every conversation will be rendered as the same text", path)
    tokenizer.chat_template = template


def require_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise SourceError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise SourceError(
            "no chat template: the tokenizer has none of its own; give one with the chat template option "
            "(a file or inline Jinja)"
        )


def todays_date() -> str:
    """Return the date here, YYYY-MM-DD."""
    return time.strftime("%Y-%m-%d")


class Clock:
    """What a template gets as `strftime_now`: midnight of one day, without a time zone.

    Attributes:
        asked: whether a template has called it.

    """

    def __init__(self, date: str) -> None:
        """Stop at a date, YYYY-MM-DD."""
        self.date = date
        self.asked = False
        self._midnight = dt.datetime.fromisoformat(date)

    def __call__(self, format: str) -> str:  # noqa: A002 - as transformers calls it
        """Write the date by a format of `strftime`."""
        self.asked = True
        return self._midnight.strftime(format)


@lru_cache(maxsize=16)
def may_ask_clock(template: str) -> bool:
    """Tell whether a template uses `strftime_now` anywhere, if only in a branch that is never taken.

    Jinja's own search for undeclared variables compiles the template, and so computes what is constant in it, however
    large; this looks at the names alone.
    """
    return any(name.name == CLOCK for name in _parsed(template).find_all(nodes.Name))


@lru_cache(maxsize=16)
def has_generation_tags(template: str) -> bool:
    """Tell whether a template marks what the assistant says, with `{% generation %}` in any spelling Jinja accepts.

    The parser tells, so a tag in a comment or a raw block does not count.

    Raises:
        SourceError: the template is not valid Jinja.

    """
    tags = _parsed(template).find_all(nodes.ExtensionAttribute)
    return any(tag.identifier == _GenerationTag.identifier for tag in tags)


def _parsed(template: str) -> nodes.Template:
    parsed: nodes.Template = _parsing(template, _environment().parse)
    return parsed


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment of its own for a template, with all that chat templates count on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _json_text
    environment.globals |= {"raise_exception": _refuse, CLOCK: _todays_clock}
    environment.globals |= {"dict": _Dictionaries(), "namespace": _Namespace}
    return environment


class _GenerationTag(Extension):
    """Parses `{% generation %}...{% endgeneration %}`, and notes which stretches of a text are inside.

    `length` is what the text has so far, `said` takes the stretches.
    """

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.length = 0
        self.said: list[Span] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Macro) -> str:
        text: str = caller()
        self.said.append((self.length, self.length + len(text)))
        return text


def _parsing(template: str, parse: Callable[[str], Any]) -> Any:  # noqa: ANN401 - what `parse` gives
    try:
        return parse(template)
    except TemplateSyntaxError as error:
        raise SourceError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error


def _names(templates: dict[str, str]) -> str:
    return f" nor one of the tokenizer's templates ({', '.join(templates)})" if templates else ""


def _looks_like_jinja(text: str) -> bool:
    return "{%" in text or "{{" in text


def _template_in(text: str) -> str | dict[str, str]:
    """Return the `chat_template` entry of JSON text (one template or several with names), else the text itself."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    entry = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(entry, list):  # the form of older tokenizer_config.json files
        return {named["name"]: named["template"] for named in entry}
    return entry if isinstance(entry, str | dict) else text
