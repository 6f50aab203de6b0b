import torch

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.blocks import blocks_at
from tests.draft.drafts import packed


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
