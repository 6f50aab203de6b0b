"""The vocabulary: what is used, by how few ids most tokens are covered, and what one damaged id does."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_store.inspection.stats.figures import summarise_vocabulary
from dspark_store.inspection.stats.tallies import TokenTally, empty_tokens, tally_tokens


def tally(ids, mask=None, vocabulary=None):
    return tally_tokens(np.array(ids), np.array(mask or [1] * len(ids)), vocabulary)


def test_counts_are_by_id_and_merge_whatever_ids_they_know():
    merged = tally([3, 1, 3], [1, 0, 0]).merge(tally([5, 1], [1, 1])).merge(empty_tokens(None))
    assert merged.counts.tolist() == [0, 2, 0, 2, 0, 1]
    assert merged.supervised.tolist() == [0, 1, 0, 1, 0, 1]


def test_ids_that_the_target_does_not_know_are_counted_apart():
    found = tally([1, 9, -1], vocabulary=4)
    assert (found.counts.tolist(), found.outside) == ([0, 1, 0, 0], 2)


def test_one_damaged_id_does_not_take_all_memory():
    found = tally([7, 2**31 - 1])
    assert (len(found.counts), found.outside) == (8, 1)


def test_a_vocabulary_that_only_a_manifest_bears_out_does_not_either():
    found = empty_tokens(2**31 - 1).merge(tally([7, 2**31 - 2], vocabulary=2**31 - 1))
    assert (len(found.counts), found.counts.sum(), found.outside) == (2**20, 1, 1)


def test_the_figures_of_a_small_vocabulary():
    counts = np.array([10, 0, 50, 40])
    figures = summarise_vocabulary(TokenTally(counts, counts * 0), 4, lambda ids: [f"<{token}>" for token in ids])
    usage = figures["all"]
    assert isinstance(usage, dict)
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
    usage = summarise_vocabulary(empty_tokens(8), 8, None)["supervised"]
    assert isinstance(usage, dict)
    assert (usage["used"], usage["entropy_bits"], usage["top"]) == (0, None, [])
    assert {item["ids"] for item in usage["needed"]} == {None}


def test_coverage_is_the_share_of_the_most_frequent_ids():
    counts = np.concatenate([np.full(100, 9), np.full(900, 1), np.zeros(500, np.int64)])
    usage = summarise_vocabulary(TokenTally(counts, counts), 1500, None)["all"]
    assert isinstance(usage, dict)
    assert usage["coverage"] == [{"ids": 100, "share": 0.5}, {"ids": 1000, "share": 1.0}]
