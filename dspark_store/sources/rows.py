"""Rows of data: what their readers give, the reading of JSON text, and rows that are tokens already."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.source import SourceError

MAX_ROW_BYTES = 32 * 1024 * 1024
REPLACEMENT = "\ufffd"
NUMBERS = frozenset({"input_ids", "loss_mask", "labels", "attention_mask"})
"""The keys of a row that are lists of numbers."""
SHAPES = (
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "input", "output"),
)
"""The keys that make a conversation, or tokens, of a row; the first that it has count. `input` may be missing."""
SHAPES_TAKEN = (
    "messages, conversations, prompt and response, prompt and completion, instruction (and input) and output, or "
    "input_ids; columns (messages=NAME) gives them other names, text_column (NAME) takes plain text"
)
BESIDE = ("tools", "system", "chat_template_kwargs", "ended", "finish_reason")
"""The keys that are read beside a conversation."""
FIELDS = ("messages", "conversations", "tools", "input_ids", "loss_mask", "labels", "attention_mask", *BESIDE[1:])
"""The columns that are read, in this order, where one of the first three shapes is among them."""
KNOWN_KEYS = frozenset({*FIELDS, *(name for shape in SHAPES for name in shape)})
HARMLESS = frozenset(
    {"id", "idx", "index", "uuid", "hash", "url", "source", "dataset", "dataset_name", "data_source", "origin", "split"}
    | {"prompt_id", "conversation_id", "conversation_hash", "message_id", "sample_id", "row_id", "model", "generated"}
    | {"language", "lang", "category", "license", "timestamp", "created", "num_turns", "num_tokens", "metadata"}
)
"""Keys that say where a row is from: that they are not read needs no word."""

IGNORED = -100
_LARGEST_ID = 2**31 - 1
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")

type RowData = bytes | dict[str, JsonValue]  # JSON text, not yet checked, or the object


class Rows(ABC):
    """Rows that were counted and hashed once, and are now given by their numbers.

    Attributes:
        name: of the file or the dataset.
        content_sha256: of all that rule 1 reads.
        beside_sha256: of what it does not read and is no part of the other; None for nothing.
        unread: columns that are not read, and may matter, and how many rows have a value there.

    """

    name: str
    content_sha256: str
    beside_sha256: str | None = None
    unread: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows; SourceError if the data is no longer what was counted."""

    def where(self, row: int) -> str:
        """Return the file and the place in it, for messages: rows are counted from 1."""
        return f"{self.name}, row {row + 1}"

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Let go of open files; `take` opens them again."""


def parse_row(data: RowData) -> tuple[dict[str, JsonValue], bool]:
    """Return the object that one row holds, and whether lone surrogates in it were replaced by U+FFFD.

    Raises:
        SourceError: the row is too large, not UTF-8, not JSON or not an object. The message does not name the place.

    """
    if not isinstance(data, bytes):
        return data, False
    row = parse_json(data)
    if not isinstance(row, dict):
        raise SourceError(f"the row is {_kind(row)}, expected an object with messages")
    if not _ESCAPED_SURROGATE.search(data):
        return row, False
    replaced, count = _without_surrogates(row)
    return cast("dict[str, JsonValue]", replaced), count > 0


def shape_of(keys: Container[str]) -> tuple[str, ...] | None:
    """Return the first of the shapes whose keys are there; None for none."""
    return next((shape for shape in SHAPES if all(name in keys or name == "input" for name in shape)), None)


def unread_keys(row: Mapping[str, JsonValue], text_column: str | None) -> list[str]:
    """Return the keys of a row that are not read and may matter. A key whose value is null is none."""
    read = {text_column}
    if text_column is None:
        shape = shape_of({key for key, value in row.items() if value is not None}) or ()
        read = {*shape, *(NUMBERS if shape == ("input_ids",) else BESIDE)}
    return [key for key, value in row.items() if value is not None and key not in read and key not in HARMLESS]


def renamed(row: Mapping[str, JsonValue], columns: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return a row under our names, given which of its keys stand for them."""
    own = {key: value for key, value in row.items() if key not in columns and key not in columns.values()}
    return {**own, **{name: row[key] for name, key in columns.items() if key in row}}


def choose_columns(place: str, names: Sequence[str], columns: Mapping[str, str], text_column: str | None) -> list[str]:
    """Return which columns of a columnar file are to be read.

    Raises:
        SourceError: one that the user named is not there, or they make no shape of rows.

    """
    there = f"{place} has the columns {', '.join(sorted(names)) or '(none)'}"
    for name in (*columns.values(), *([text_column] if text_column else [])):
        if name not in names:
            raise SourceError(f"{there}; expected {name!r}, which was named")
    if text_column:
        return [text_column]
    ours = {name: name for name in names if name not in columns.values()} | dict(columns)
    shape = shape_of(ours)
    if shape is None:
        raise SourceError(f"{there}; expected {SHAPES_TAKEN}")
    wanted = FIELDS if len(shape) == 1 else (*shape, *BESIDE)
    return [ours[name] for name in wanted if name in ours]


def without_null_keys(value: JsonValue, as_it_is: frozenset[str] = frozenset()) -> JsonValue:
    """Return a value without the keys of its objects that are null, but for what is below the keys `as_it_is`.

    Columnar files hold null where a row has no key, at any depth. The members of lists stay.
    """
    if isinstance(value, list):
        return [without_null_keys(item, as_it_is) if isinstance(item, dict | list) else item for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_null_keys(item, as_it_is) if isinstance(item, dict | list) and key not in as_it_is else item
        for key, item in value.items()
        if item is not None
    }


def parse_json(text: bytes, limit: int | None = MAX_ROW_BYTES) -> JsonValue:
    """Return what a JSON text holds.

    Raises:
        SourceError: it is longer than `limit` bytes, not UTF-8 or not JSON (NaN is not), or an object has a key
            twice.

    """
    if limit is not None and len(text) > limit:
        raise SourceError(f"the row has more than {limit:,} bytes; leave it out or divide it")
    try:
        return cast(
            JsonValue,
            json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_refuse_constant),
        )
    except UnicodeDecodeError as error:
        raise SourceError(f"byte {error.start} is not valid UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise SourceError(f"not valid JSON ({error.msg} at {line}column {error.colno})") from error
    except SourceError:
        raise
    except (ValueError, RecursionError) as error:
        raise SourceError(f"JSON that cannot be read ({error})") from error


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise SourceError(f"the key {twice!r} stands twice in one object; which of the values is meant?")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise SourceError(f"not valid JSON ({name} is no JSON number)")


def _without_surrogates(value: JsonValue) -> tuple[JsonValue, int]:
    if isinstance(value, str):
        return _SURROGATE.subn(REPLACEMENT, value)
    if isinstance(value, list):
        items = [_without_surrogates(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    if isinstance(value, dict):
        pairs = [(_SURROGATE.sub(REPLACEMENT, key), *_without_surrogates(item)) for key, item in value.items()]
        return {key: item for key, item, _ in pairs}, sum(count for _, _, count in pairs)
    return value, 0


def _kind(value: JsonValue) -> str:
    return "null" if value is None else f"a JSON {type(value).__name__}"


def read_tokens(row: Mapping[str, JsonValue], vocab_size: int | None) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return the `input_ids` of a row, int32, and its loss mask, uint8, both of shape (length,).

    The mask is the row's `loss_mask` (0 or 1, or booleans), or 1 where its `labels` are not -100, or 1 everywhere if
    it has neither. Labels are those of transformers: not shifted, so that where they are not -100 they are the ids.

    Args:
        row: the row.
        vocab_size: ids must be below it, if given.

    Raises:
        SourceError: a field has another form, the lengths differ, an id is outside of the vocabulary, or the row is
            padded (its `attention_mask` has zeros).

    """
    ids = _integers(row["input_ids"], "input_ids")
    limit = _LARGEST_ID if vocab_size is None else vocab_size - 1
    outside = np.flatnonzero((ids < 0) | (ids > limit))
    if len(outside):
        raise SourceError(f"input_ids[{outside[0]}] is {ids[outside[0]]}, expected 0 to {limit}")
    attention = _field(row, "attention_mask", len(ids))
    if attention is not None and not attention.all():
        raise SourceError("attention_mask has zeros: the row is padded; give rows without padding")
    mask = _field(row, "loss_mask", len(ids))
    labels = _field(row, "labels", len(ids))
    if mask is not None and not np.isin(mask, (0, 1)).all():
        raise SourceError(f"loss_mask holds {mask[~np.isin(mask, (0, 1))][0]}, expected 0 and 1")
    if mask is None and labels is not None:
        mask = (labels != IGNORED).astype(np.int64)
        different = np.flatnonzero((mask == 1) & (labels != ids))
        if len(different):
            at = different[0]
            raise SourceError(
                f"labels[{at}] is {labels[at]} and input_ids[{at}] is {ids[at]}; expected the same or {IGNORED} "
                "(labels are not shifted)"
            )
    if mask is None:
        mask = np.ones(len(ids), dtype=np.int64)
    return ids.astype(np.int32), mask.astype(np.uint8)


def _field(row: Mapping[str, JsonValue], name: str, length: int) -> NDArray[np.int64] | None:
    if row.get(name) is None:
        return None
    values = _integers(row[name], name)
    if len(values) != length:
        raise SourceError(f"{name} has {len(values)} values and input_ids {length}; expected as many")
    return values


def _integers(values: JsonValue, name: str) -> NDArray[np.int64]:
    if not isinstance(values, list):
        raise SourceError(f"{name} must be a list of integers, got {type(values).__name__}")
    for index, value in enumerate(values):
        if not isinstance(value, int):
            raise SourceError(f"{name}[{index}] must be an integer, got {value!r:.60}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise SourceError(f"{name} holds a number of more than 64 bits") from error
