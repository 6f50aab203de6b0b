import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.draft.anchors import Anchors, anchor_candidates, blocks_at, draw_anchors, sample_keys
from tests.draft.drafts import packed, random_, random_keys

KEYS = [[3871043760870078, 2159198217602378625], [1329377492151878472, 3088135980263792678]]


def test_a_key_is_a_function_of_seed_epoch_sample_and_position_alone():
    both = sample_keys(torch.tensor([7, 3]), 9, seed=1, epoch=2)
    alone = sample_keys(torch.tensor([3]), 5, seed=1, epoch=2)
    assert torch.equal(both[1, :5], alone[0])


def test_keys_are_those_of_splitmix64():
    """Another order of anchors is another training run: these may change with a new version only."""
    keys = sample_keys(torch.tensor([0, 5]), 2, seed=3, epoch=1)
    assert keys.tolist() == KEYS


def test_seed_epoch_sample_and_position_each_change_the_key():
    samples = torch.arange(50)
    keys = [sample_keys(samples, 8, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert torch.stack(keys).unique().numel() == 4 * 50 * 8


def drawn(mask, num_anchors, seed=0):
    mask = torch.tensor([mask])
    candidates = anchor_candidates(mask)
    return draw_anchors(candidates, random_keys(1, mask.shape[1], random_(seed)), num_anchors)


def test_a_candidate_and_the_token_after_it_are_supervised():
    candidates = anchor_candidates(torch.tensor([[1, 1, 0, 1, 1, 1]]))
    assert candidates.tolist() == [[True, False, False, True, True]]


def test_the_last_position_of_a_packed_document_is_no_candidate():
    packing = packed(3, 3)
    candidates = anchor_candidates(torch.ones(1, 6, dtype=torch.long), packing.doc_remaining)
    assert candidates.tolist() == [[True, True, False, True, True]]


def test_slots_without_a_candidate_are_not_kept():
    anchors = drawn([1, 1, 0, 1, 1, 1], 8)
    assert anchors.positions.tolist() == [[0, 3, 4, 0, 0, 0, 0, 0]]
    assert anchors.kept.tolist() == [[True] * 3 + [False] * 5]


def test_a_row_of_one_position_keeps_nothing():
    anchors = drawn([1], 3)
    assert anchors.positions.tolist() == [[0, 0, 0]]
    assert not anchors.kept.any()


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 99))
def test_anchors_are_distinct_candidates_in_order_and_as_many_as_there_can_be(mask, num_anchors, seed):
    anchors = drawn(mask, num_anchors, seed)
    kept = anchors.positions[anchors.kept].tolist()
    candidates = {p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]}
    assert anchors.positions.shape == anchors.kept.shape == (1, num_anchors)
    assert len(kept) == min(num_anchors, len(candidates))
    assert kept == sorted(set(kept))
    assert set(kept) <= candidates
    assert not anchors.positions[~anchors.kept].any()


def test_every_candidate_is_as_likely_as_any_other():
    candidates = anchor_candidates(torch.tensor([[1, 1, 1, 0, 1, 1, 1]]).expand(6000, -1))
    keys = sample_keys(torch.arange(6000), 7, seed=0, epoch=0)
    anchors = draw_anchors(candidates, keys, 1)
    counts = torch.bincount(anchors.positions.flatten(), minlength=6)
    assert counts[[2, 3]].sum() == 0
    assert (counts[[0, 1, 4, 5]] - 1500).abs().max() < 150


def test_padding_moves_no_anchor():
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1]])
    wide = torch.nn.functional.pad(mask, (0, 9))
    both = [
        draw_anchors(anchor_candidates(m), sample_keys(torch.tensor([8]), m.shape[1], seed=1, epoch=0), 3).positions
        for m in (mask, wide)
    ]
    assert torch.equal(*both)


def test_fewer_than_one_anchor_is_refused():
    with pytest.raises(ValueError, match="num_anchors must be >= 1, got 0"):
        drawn([1, 1], 0)


def laid(positions, mask, block_size, kept=None, doc_remaining=None):
    positions = torch.tensor([positions])
    keep = torch.ones_like(positions, dtype=torch.bool) if kept is None else torch.tensor([kept])
    mask = torch.tensor([mask])
    ids = 100 + torch.arange(mask.shape[1])[None]
    return blocks_at(Anchors(positions, keep), ids, mask, block_size, doc_remaining)


def test_a_slot_predicts_the_token_after_it():
    blocks = laid([1, 2], [1] * 8, 3)
    assert blocks.labels.tolist() == [[[102, 103, 104], [103, 104, 105]]]
    assert blocks.previous.tolist() == [[[101, 102, 103], [102, 103, 104]]]
    assert blocks.sources.tolist() == [[[1, 2, 3], [2, 3, 4]]]


def test_a_block_counts_up_to_its_first_token_that_is_not_supervised():
    blocks = laid([0, 3, 4], [1, 1, 0, 1, 1, 1], 3)
    assert blocks.supervised.tolist() == [[[True, False, False], [True, True, False], [True, False, False]]]
    assert blocks.live.tolist() == [[True, True, True]]


def test_labels_past_the_end_are_clamped_and_do_not_count():
    blocks = laid([2], [1] * 4, 3)
    assert blocks.labels.tolist() == [[[103, 103, 103]]]
    assert blocks.supervised.tolist() == [[[True, False, False]]]


def test_a_block_that_is_not_kept_counts_nowhere():
    blocks = laid([1, 0], [1] * 6, 2, kept=[True, False])
    assert blocks.supervised.tolist() == [[[True, True], [False, False]]]
    assert blocks.labels[0, 1].tolist() == [100, 100]
    assert blocks.live.tolist() == [[True, False]]


def test_a_block_ends_with_its_packed_document():
    packing = packed(4, 4)
    blocks = laid([2], [1] * 8, 4, doc_remaining=packing.doc_remaining)
    assert blocks.supervised.tolist() == [[[True, False, False, False]]]


def test_documents_are_counted_by_their_first_positions():
    assert packed(3, 2).documents.tolist() == [[0, 0, 0, 1, 1]]
