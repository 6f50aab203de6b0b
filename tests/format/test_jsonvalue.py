"""One canonical text a value."""

import hashlib
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.jsonvalue import MOST_NESTED, JsonFields, canonical_json, json_digest, parse_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(VALUES)
def test_the_canonical_text_is_json_of_the_value(value):
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), st.integers()))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]):
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_the_canonical_text_is_pinned():
    assert canonical_json({"b": [1, None, True, 1.5], "a": "ü"}) == '{"a":"ü","b":[1,null,true,1.5]}'.encode()


def test_the_digest_is_blake2b_over_the_canonical_text():
    assert json_digest({"a": 1}) == hashlib.blake2b(b'{"a":1}', digest_size=16).hexdigest()
    assert len(json_digest({}, size=8)) == 16


def test_nan_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))


@given(VALUES)
def test_what_was_written_is_parsed_as_it_was(value):
    assert parse_json(canonical_json(value)) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"NaN", "NaN is no JSON number"),
        (b"[-Infinity]", "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "number 1e999 is not finite"),
        (b"-1e999", "not finite"),
        (rb'["\ud800"]', r"'\\ud800' holds half of a surrogate pair"),
        (rb'{"\udfff": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested more than"),
        (b'{"a":' * 100_000, "nested more than"),
        (b"[" * (MOST_NESTED + 2) + b"]" * (MOST_NESTED + 2), "nested more than"),
        (b'{"a": {"b": 1, "b": 1}}', "key 'b' stands twice"),
        (b"\xff", "utf-8"),
        ("1".encode("utf-16"), "utf-8"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b"9" * 5000, "digits"),
        (b"", "Expecting value"),
        (b"1 2", "Extra data"),
    ],
)
def test_what_no_writer_writes_is_no_json(text, why: str):
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_nesting_is_allowed_up_to_the_bound():
    assert parse_json(b"[" * MOST_NESTED + b"]" * MOST_NESTED)


FIELDS = JsonFields({"n": 3, "b": True, "t": "x", "list": [1, 2], "names": ["a"], "table": {}, "nothing": None}, "it")


def test_fields_of_the_right_type_are_given():
    assert (FIELDS.count("n"), FIELDS.flag("b"), FIELDS.text("t")) == (3, True, "x")
    assert (FIELDS.counts("list"), FIELDS.texts("names"), FIELDS.table("table")) == ((1, 2), ("a",), {})
    assert FIELDS.has("n")
    assert not FIELDS.has("nothing")
    assert not FIELDS.has("absent")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: FIELDS.count("b"), "it: 'b' is True, expected a whole number from 0 to"),
        (lambda: FIELDS.count("t"), "'t' is 'x', expected a whole number"),
        (lambda: FIELDS.count("n", 4), "'n' is 3, expected a whole number from 4 to"),
        (lambda: FIELDS.count("n", 0, 2), "'n' is 3, expected a whole number from 0 to 2"),
        (lambda: FIELDS.count("absent"), "it: field 'absent' is missing"),
        (lambda: FIELDS.flag("n"), "'n' is 3, expected true or false"),
        (lambda: FIELDS.text("nothing"), "'nothing' is None, expected a text"),
        (lambda: FIELDS.items("t"), "'t' is 'x', expected a list"),
        (lambda: FIELDS.counts("names"), "'names' is 'a', expected a whole number"),
        (lambda: FIELDS.texts("list"), "'list' is 1, expected a text"),
        (lambda: FIELDS.table("list"), "'list' is list, expected an object"),
        (lambda: FIELDS.number("b"), "'b' is True, expected a number"),
        (lambda: FIELDS.is_null("absent"), "it: field 'absent' is missing"),
        (lambda: JsonFields.of([], "it"), "it: it is list, expected an object"),
    ],
)
def test_a_field_of_another_type_is_damage_and_named(read: Callable[[], object], message):
    with pytest.raises(DamagedStoreError, match=message):
        read()
