import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.draft.anchors import anchor_candidates, draw_anchors
from dspark_store.draft.keys import generated_keys, sample_keys
from tests.draft.drafts import packed, random_


def drawn(mask, num_anchors, seed=0):
    mask = torch.tensor([mask])
    candidates = anchor_candidates(mask)
    return draw_anchors(candidates, generated_keys(1, mask.shape[1], random_(seed)), num_anchors)


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
