"""JSON values: their type, the one canonical text of each, which every digest here is taken over, and reading them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from dspark_store.format.damage import DamagedStoreError

type JsonValue = bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None

MOST_NESTED = 64
"""Objects and lists inside of each other, at most, in what is read from a store."""
MOST_COUNTED = 2**63 - 1
"""What any number of the format stays within, so that arrays and files can have it as a size."""
_TOO_DEEP = f"it is nested more than {MOST_NESTED} deep"
_SHOWN = 60


def canonical_json(value: JsonValue) -> bytes:
    """Return the canonical UTF-8 text: sorted keys, no spaces, non-ASCII as itself, NaN refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def json_digest(value: JsonValue, size: int = 16) -> str:
    """Return the hexadecimal blake2b digest of ``size`` bytes over the canonical text."""
    return hashlib.blake2b(canonical_json(value), digest_size=size).hexdigest()


def parse_json(text: bytes) -> JsonValue:
    """Parse one JSON text, as strictly as it was written.

    ValueError, in one line, for what no writer of this format writes: text that is not UTF-8, NaN, infinities, numbers
    past every float, half of a surrogate pair, a key that stands twice, or nesting deeper than `MOST_NESTED`.
    """
    try:
        value: JsonValue = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_float=_finite,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth_and_texts(value)
    return value


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"key {shown(name)} stands twice in one object")
        fields[name] = value
    return fields


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"number {text[:_SHOWN]} is not finite")
    return number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _check_depth_and_texts(value: JsonValue) -> None:
    level: list[JsonValue] = [value]
    for _ in range(MOST_NESTED + 1):
        inner: list[JsonValue] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, Mapping):
                for name in item:
                    _check_text(name)
                inner += item.values()
            elif isinstance(item, Sequence):
                inner += item
        if not inner:
            return
        level = inner
    raise ValueError(_TOO_DEEP)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"text {shown(text)} holds half of a surrogate pair") from None


def shown(value: object) -> str:
    """Return a value as an error shows it: in ASCII, cut where it is long."""
    text = ascii(value) if not isinstance(value, Mapping | list | tuple) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class JsonFields:
    """The fields of a JSON object that somebody else may have written, each read as the type that it must have.

    ``where`` names the object in errors. Every method raises DamagedStoreError, naming the field and its value, when it
    is missing or of another type; true and false are no numbers.
    """

    fields: Mapping[str, JsonValue]
    where: str

    @classmethod
    def of(cls, value: JsonValue, where: str) -> JsonFields:
        """Take a value that must be an object."""
        if not isinstance(value, Mapping):
            raise DamagedStoreError(f"{where}: it is {shown(value)}, expected an object")
        return cls(value, where)

    def count(self, name: str, least: int = 0, most: int = MOST_COUNTED) -> int:
        """Return a whole number from ``least`` to ``most``."""
        return self._count(self._field(name), name, least, most)

    def number(self, name: str) -> float:
        """Return a number, whole or not."""
        value = self._field(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        return self._refuse(name, value, "a number")

    def counts(self, name: str, least: int = 0, most: int = MOST_COUNTED) -> tuple[int, ...]:
        """Return a list of whole numbers from ``least`` to ``most``."""
        return tuple(self._count(value, name, least, most) for value in self.items(name))

    def text(self, name: str) -> str:
        """Return a text."""
        return self._text(self._field(name), name)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        return tuple(self._text(value, name) for value in self.items(name))

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._field(name)
        return value if isinstance(value, bool) else self._refuse(name, value, "true or false")

    def items(self, name: str) -> Sequence[JsonValue]:
        """Return a list."""
        value = self._field(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return value
        return self._refuse(name, value, "a list")

    def table(self, name: str) -> Mapping[str, JsonValue]:
        """Return an object."""
        value = self._field(name)
        return value if isinstance(value, Mapping) else self._refuse(name, value, "an object")

    def is_null(self, name: str) -> bool:
        """Tell whether a field, which must be there, is null."""
        return self._field(name) is None

    def has(self, name: str) -> bool:
        """Tell whether a field is there and not null."""
        return self.fields.get(name) is not None

    def _field(self, name: str) -> JsonValue:
        if name not in self.fields:
            raise DamagedStoreError(f"{self.where}: field {shown(name)} is missing")
        return self.fields[name]

    def _count(self, value: JsonValue, name: str, least: int, most: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        return self._refuse(name, value, f"a whole number from {least} to {most}")

    def _text(self, value: JsonValue, name: str) -> str:
        return value if isinstance(value, str) else self._refuse(name, value, "a text")

    def _refuse(self, name: str, value: JsonValue, expected: str) -> NoReturn:
        raise DamagedStoreError(f"{self.where}: {shown(name)} is {shown(value)}, expected {expected}")
