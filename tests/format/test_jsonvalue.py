"""One canonical text a value."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.jsonvalue import JsonValue, canonical_json, json_digest

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(VALUES)
def test_the_canonical_text_is_json_of_the_value(value: JsonValue) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_the_canonical_text_is_pinned() -> None:
    assert canonical_json({"b": [1, None, True, 1.5], "a": "ü"}) == '{"a":"ü","b":[1,null,true,1.5]}'.encode()


def test_the_digest_is_blake2b_over_the_canonical_text() -> None:
    assert json_digest({"a": 1}) == hashlib.blake2b(b'{"a":1}', digest_size=16).hexdigest()
    assert len(json_digest({}, size=8)) == 16


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))
