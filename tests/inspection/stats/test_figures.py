"""Figures of ids: how many are used, and how few of them most tokens are; and how figures are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_store.inspection.stats.figures import figure_text, summarise_ids
from dspark_store.inspection.stats.tallies import tally_tokens


def tally(ids, mask=None, vocabulary=None):
    return tally_tokens(np.array(ids, np.int64), np.array(mask or [1] * len(ids), np.int64), vocabulary)


def test_counts_are_by_id_and_merge():
    merged = tally([3, 1, 3], [1, 0, 0], 7).merge(tally([5, 1], [1, 1], 7)).merge(tally([], vocabulary=7))
    assert merged.counts.tolist() == [0, 2, 0, 2, 0, 1, 0]
    assert merged.supervised.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_ids_that_the_target_does_not_know_are_counted_apart():
    found = tally([1, 9, -1], vocabulary=4)
    assert (found.counts.tolist(), found.outside) == ([0, 1, 0, 0], 2)


@pytest.mark.parametrize("vocabulary", [None, 2**31 - 1])
def test_neither_one_damaged_id_nor_a_manifest_takes_all_memory(vocabulary):
    found = tally([7, 2**31 - 2], vocabulary=vocabulary)
    assert (len(found.counts), found.counts.sum(), found.outside) == (2**20, 1, 1)


def test_the_figures_of_a_small_vocabulary():
    counts = np.array([10, 0, 50, 40])
    usage: Any = summarise_ids(counts, 4, lambda ids: [f"<{token}>" for token in ids])
    assert (usage["used"], usage["share_used"], usage["tokens"]) == (3, 0.75, 100)
    assert [(item["text"], item["count"], item["share"]) for item in usage["top"]] == [
        ("<2>", 50, 0.5),
        ("<3>", 40, 0.4),
        ("<0>", 10, 0.1),
    ]
    needed = {item["share"]: item["ids"] for item in usage["needed"]}
    assert needed == {0.5: 1, 0.9: 2, 0.95: 3, 0.99: 3, 0.999: 3}
    assert usage["entropy_bits"] == pytest.approx(1.3610, abs=1e-4)
    assert usage["by_rank"] == {"rank": [1, 2, 3], "count": [50, 40, 10]}


def test_no_tokens_have_figures_too():
    usage: Any = summarise_ids(np.zeros(8, np.int64), 8, None)
    assert (usage["used"], usage["entropy_bits"], usage["top"]) == (0, None, [])
    assert {item["ids"] for item in usage["needed"]} == {None}


def test_coverage_is_the_share_of_the_most_frequent_ids():
    counts = np.concatenate([np.full(100, 9), np.full(900, 1), np.zeros(500, np.int64)])
    usage = summarise_ids(counts, 1500, None)
    assert usage["coverage"] == [{"ids": 100, "share": 0.5}, {"ids": 1000, "share": 1.0}]


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
