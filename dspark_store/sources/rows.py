"""Rows of data, whatever holds them: the protocol, and how the JSON text of one is read."""

import json
import re
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.source import SourceError

MAX_ROW_BYTES = 32 * 1024 * 1024
REPLACEMENT = "\ufffd"
FIELDS = ("messages", "conversations", "tools", "input_ids", "loss_mask", "labels", "attention_mask")
"""The fields of a row that are read."""
NUMBERS = frozenset({"input_ids", "loss_mask", "labels", "attention_mask"})
"""Those of them that are lists of numbers."""

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")

type RowData = bytes | dict[str, JsonValue]  # JSON text, not yet checked, or the object


class Rows(Protocol):
    """Rows that were counted and hashed once, and are now given by their numbers."""

    content_sha256: str

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def where(self, row: int) -> str:
        """Return the file and the place in it, for messages."""
        ...

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows; SourceError if the data is no longer what was counted."""
        ...

    def close(self) -> None:
        """Let go of open files; `take` opens them again."""
        ...


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
