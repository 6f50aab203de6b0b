import pytest
import torch

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.masks import dense_mask, flex_mask
from tests.draft.drafts import packed


def anchors_at(rows, kept=None):
    positions = torch.tensor(rows)
    return Anchors(positions, torch.ones_like(positions, dtype=torch.bool) if kept is None else torch.tensor(kept))


def test_a_block_sees_the_context_before_its_anchor_and_all_of_itself():
    mask = dense_mask(anchors_at([[2, 5], [3, 6]]), 4, 8)
    assert mask.shape == (2, 1, 8, 16)
    for row, anchors in enumerate([[2, 5], [3, 6]]):
        for block, anchor in enumerate(anchors):
            for slot in range(4):
                seen = mask[row, 0, 4 * block + slot].nonzero().flatten().tolist()
                assert seen == [*range(anchor), *range(8 + 4 * block, 12 + 4 * block)]


def test_a_block_that_is_not_kept_sees_itself_alone():
    mask = dense_mask(anchors_at([[3, 0]], [[True, False]]), 2, 5)
    assert mask[0, 0, 2].nonzero().flatten().tolist() == [7, 8]
    assert mask.any(dim=3).all()


def test_a_block_of_a_packed_row_sees_its_own_document_alone():
    mask = dense_mask(anchors_at([[2, 5]]), 1, 8, packed(4, 4).documents)
    assert mask[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 8]
    assert mask[0, 0, 1].nonzero().flatten().tolist() == [4, 9]


@pytest.mark.parametrize("documents", [None, packed(5, 4).documents.expand(2, -1)])
def test_flex_attention_is_given_the_same_mask(documents):
    anchors = anchors_at([[2, 7], [6, 0]], [[True, True], [True, False]])
    dense, flex = dense_mask(anchors, 3, 9, documents), flex_mask(anchors, 3, 9, documents)
    rows, slots, keys = (torch.arange(size) for size in (2, 6, 15))
    seen = flex.mask_mod(rows[:, None, None], torch.tensor(0), slots[:, None], keys)
    assert torch.equal(seen, dense[:, 0])
