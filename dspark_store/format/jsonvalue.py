"""JSON values: their type, and the one canonical text of each, which every digest here is taken over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

type JsonValue = bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None


def canonical_json(value: JsonValue) -> bytes:
    """Return the canonical UTF-8 text: sorted keys, no spaces, non-ASCII as itself, NaN refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def json_digest(value: JsonValue, size: int = 16) -> str:
    """Return the hexadecimal blake2b digest of ``size`` bytes over the canonical text."""
    return hashlib.blake2b(canonical_json(value), digest_size=size).hexdigest()
