import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.target.layers import build_target_layer_ids, validate_target_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [
        (2, 5, [1]),
        (4, 2, [1, 3]),
        (4, 5, [1, 2, 3]),
        (6, 3, [1, 3, 5]),
        (8, 4, [1, 3, 5, 7]),
        (8, 5, [1, 2, 4, 6, 7]),
        (28, 1, [27]),
        (28, 0, [27]),
        (28, -3, [27]),
        (28, 5, [1, 8, 14, 20, 27]),
        (36, 5, [1, 10, 18, 26, 35]),
        (48, 5, [1, 12, 24, 36, 47]),
        (62, 5, [1, 16, 31, 46, 61]),
        (61, 3, [1, 30, 60]),
        (43, 2, [1, 42]),
        (78, 3, [1, 39, 77]),
    ],
)
def test_default_ids_match_the_table(num_layers, count, expected):
    assert build_target_layer_ids(num_layers, count) == expected


def test_a_target_of_one_layer_has_no_default_ids():
    with pytest.raises(ValueError, match="target of 1 layers"):
        build_target_layer_ids(1, 5)


@given(st.integers(2, 200), st.integers(-5, 250))
def test_default_ids_are_valid_and_end_in_the_last_layer(num_layers, count):
    ids = build_target_layer_ids(num_layers, count)
    assert validate_target_layer_ids(ids, num_layers, explicit=False) == ids
    assert ids[-1] == num_layers - 1
    assert len(ids) == min(max(count, 1), num_layers - 1)


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-2, 1], [0, 4], [0, 1.5], ["0"]])
def test_ids_that_do_not_fit_are_refused_by_name_and_range(ids):
    with pytest.raises(ValueError, match=r"layer ids \[.*each -1 or in \[0, 3\]") as error:
        validate_target_layer_ids(ids, 4)
    assert str(ids) in str(error.value)


def test_chosen_ids_that_sglang_cannot_serve_give_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert validate_target_layer_ids([-1, 1, 3], 4) == [-1, 1, 3]
    (record,) = caplog.records
    assert "SGLang" in record.getMessage()
    assert "3" in record.getMessage()


def test_servable_ids_and_default_ids_give_no_warning(caplog):
    with caplog.at_level(logging.WARNING):
        validate_target_layer_ids([0, 1, 2], 4)
        validate_target_layer_ids([1, 3], 4, explicit=False)
    assert not caplog.records
