"""Figures: one rule for how each is written."""

import pytest

from dspark_store.inspection.stats.report import figure_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (0.0, "0"),
        (52.186, "52.19"),
        (12345.6, "12,346"),
        (0.00123456, "0.001235"),
        (-3.0, "-3.000"),
        (1.5e9, "1.500e+09"),
        (1e-5, "1.000e-05"),
        (None, "–"),  # noqa: RUF001 - a dash
        (True, "yes"),
        ("a b", "a b"),
    ],
)
def test_a_value_is_written_with_what_can_be_read(value, text):
    assert figure_text(value) == text


@pytest.mark.parametrize(("share", "text"), [(0.5, "50.00 %"), (1, "100.00 %"), (0, "0.00 %"), (1e-6, "< 0.01 %")])
def test_shares_are_percentages_and_a_small_one_is_not_zero(share, text):
    assert figure_text(share, "percent") == text


def test_tokens_show_their_white_space_and_nothing_invisible():
    assert figure_text(" a\n\t\x00é", "token") == "␣a⏎⇥\\x00é"
    assert figure_text(-4, "power") == "2^-4"


def test_a_number_that_counts_nothing_is_written_as_it_is():
    assert figure_text(128009, "id") == "128009"
