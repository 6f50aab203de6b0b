"""The options of conversations: what a job, one source and `dspark-store tokens` can say alike, defined once."""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.settings import nearest
from dspark_store.sources.rows import KNOWN_KEYS
from dspark_store.sources.source import SourceError

ON_BAD_ROW = ("error", "skip")
ORDERS = ("automodel",)
OVER_LONG = ("truncate", "drop", "split")
SIDES = ("right", "left")

_SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_RESERVED = frozenset(
    # what we and transformers hand to templates ourselves
    {"conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"}
    | {"tokenizer_kwargs", "raise_exception", "strftime_now", "additional_special_tokens", *_SPECIAL_TOKENS}
)
_NOT_IDENTITY = frozenset({"max_refused"})  # it decides whether a job goes on, and not what is in its store
_LATER = frozenset({"mask_generation_prompt"})  # part of the identity only where set: older stores lack it


def _unchanged(value: object) -> object:
    return value


def _option(default: Any, help: str, **of_flag: Any) -> Any:  # noqa: A002, ANN401 - a field's default, argparse's names
    return field(default=default, metadata={"help": help, "group": "data", **of_flag})


def check_template_kwargs(given: object, where: str) -> dict[str, JsonValue]:
    """Return variables for chat templates; SourceError if they are no object, or one is not for users to give."""
    if not isinstance(given, Mapping):
        raise SourceError(f"{where} must be an object of variables, got {given!r:.60}")
    for name in given:
        if not isinstance(name, str) or name in _RESERVED or name.startswith("return_"):
            raise SourceError(f"{where} has {name!r}, which is given to templates anyway; leave it out")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{where} must be JSON ({error})") from error
    return dict(given)


def _template_kwargs(given: object) -> dict[str, JsonValue] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise SourceError(f"chat_template_kwargs is {given!r}, which is not JSON ({error})") from error
    return check_template_kwargs(given, "chat_template_kwargs") or None


def _columns(given: object) -> dict[str, str] | None:
    """Return which column stands for each of our names, from a mapping or words `name=column`."""
    pairs = given.items() if isinstance(given, Mapping) else _column_pairs(given)
    columns = {}
    for name, column in pairs:
        if name not in KNOWN_KEYS:
            near = nearest(str(name), KNOWN_KEYS)
            raise SourceError(f"columns: {name!r} is none of the names that are read; the nearest is {near!r}")
        if not isinstance(column, str) or not column:
            raise SourceError(f"columns: {name} is {column!r}; expected the name of a column")
        columns[name] = column
    return columns or None


def _column_pairs(given: object) -> list[tuple[str, str]]:
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, Sequence):
        raise SourceError(f"columns is {given!r}; expected a mapping, or messages=NAME and the like")
    pairs = [str(word).partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals:
            raise SourceError(f"columns: {name!r} is no name=column; for example messages=conversation")
    return [(name, column) for name, _, column in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How rows become samples, be they tokens or text. A field's metadata is what argparse needs for its flag.

    Attributes:
        on_bad_row: "error" ends at a row that cannot be used; "skip" leaves it out and counts it. Lone surrogates make
            a row one that cannot be used, or are replaced by U+FFFD and counted.
        max_refused: the share of the rows, 0 to 1, that may be left out as unusable before it is an error.
        over_long: "truncate" keeps `seq_length` tokens of longer rows, "drop" leaves them out, "split" makes
            consecutive samples of them, each `seq_length` long but the last.
        truncation_side: where "truncate" cuts, "right" or "left"; None for the tokenizer's own.
        min_supervised: leave out samples with fewer supervised tokens, after the cut.
        order: "automodel" reads the rows that NeMo Automodel reads, in its order (`row_order.select_automodels_rows`);
            None those of `row_order.select_rows`.
        columns: which key or column of the data stands for each of our names, such as `messages`.

    """

    on_bad_row: str = _option(
        "error", "what a row that cannot be used does: end the job, or be skipped and counted", choices=ON_BAD_ROW
    )
    max_refused: float = _option(0.01, "share of the rows that may be skipped as unusable before it is an error")
    over_long: str = _option(
        "truncate", "what becomes of conversations of more than S tokens: cut, left out, or split", choices=OVER_LONG
    )
    truncation_side: str | None = _option(None, "where they are cut: the tokenizer's side if not given", choices=SIDES)
    min_supervised: int = _option(0, "leave out samples with fewer supervised tokens")
    order: str | None = _option(
        None, "automodel: the rows that NeMo Automodel reads, in its order; JSON files are not shuffled", choices=ORDERS
    )
    columns: Mapping[str, str] | None = _option(
        None, "what the data calls messages, tools and the like", convert=_columns, nargs="+", metavar="NAME=COLUMN"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(RowOptions):
    """How conversations become samples.

    Attributes:
        mask_headers: do not supervise the role headers of assistant messages, where the template has no generation
            tags.
        mask_reasoning_content: do not supervise the `reasoning_content` of assistant messages.
        mask_generation_prompt: do not supervise what the template's generation prompt writes before an answer: its
            header, and a block of reasoning that is opened or left empty; with generation tags too.
        chat_template_kwargs: variables for the chat template; those of a row win over them, key by key.
        text_column: rows are the text of this key, with the special tokens that the tokenizer adds by itself, and
            nothing else; all of it is supervised.
        template_date: YYYY-MM-DD, for templates that ask the clock; None: today's, and that of the first run ever
            after.

    """

    mask_headers: bool = _option(False, "do not supervise the role headers of assistant messages")
    mask_reasoning_content: bool = _option(False, "do not supervise reasoning_content")
    mask_generation_prompt: bool = _option(
        False, "do not supervise what the generation prompt writes before an answer, as NeMo Automodel has it"
    )
    chat_template_kwargs: Mapping[str, JsonValue] | None = _option(
        None,
        'variables for the chat template, such as {"enable_thinking": false}',
        convert=_template_kwargs,
        metavar="JSON",
    )
    text_column: str | None = _option(None, "read this column as plain text, all of it supervised", metavar="NAME")
    template_date: str | dt.date | None = _option(  # noqa: RUF009 - it makes a field, as all of these do
        None, "the date, YYYY-MM-DD, for a chat template that asks the clock: that of the first run if not given"
    )

    def check_options(self) -> None:
        """Raise SourceError naming the first option that cannot be."""
        for option in fields(ChatOptions):
            choices, value = option.metadata.get("choices"), getattr(self, option.name)
            if choices and value not in (option.default, *choices):
                raise SourceError(f"{option.name} is {value!r}; expected one of {', '.join(choices)}")
        if not 0 <= self.max_refused <= 1:
            raise SourceError(f"max_refused is {self.max_refused}; expected a share from 0 to 1")
        if self.template_date is not None and not _is_date(str(self.template_date)):
            raise SourceError(f"template_date is {str(self.template_date)!r}; expected a date, YYYY-MM-DD")
        if self.min_supervised < 0:
            raise SourceError(f"min_supervised is {self.min_supervised}; expected 0 or more")


def _is_date(text: str) -> bool:
    try:
        return dt.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


DEFAULT_OPTIONS = ChatOptions()


def options_of(given: object, own: Mapping[str, Any] = MappingProxyType({})) -> ChatOptions:
    """Return the options among the attributes of settings, flags or a context; `own` wins. None is one not given."""
    chosen = {}
    for option in fields(ChatOptions):
        value = own.get(option.name)
        value = getattr(given, option.name) if value is None else value
        if value is not None:
            chosen[option.name] = option.metadata.get("convert", _unchanged)(value)
    return ChatOptions(**chosen)


def option_values(options: ChatOptions) -> dict[str, Any]:
    """Return the options by name."""
    return {option.name: getattr(options, option.name) for option in fields(ChatOptions)}


def options_identity(options: ChatOptions) -> dict[str, JsonValue]:
    """Return the options that decide the samples. One that is None, which is not given, is not among them."""
    values = {name: value for name, value in option_values(options).items() if name not in _NOT_IDENTITY}
    return {name: value for name, value in values.items() if value is not None and (value or name not in _LATER)}
