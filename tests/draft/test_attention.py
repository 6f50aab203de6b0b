import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dspark_store.draft import attention
from dspark_store.draft.anchors import Anchors
from dspark_store.draft.attention import attend
from dspark_store.draft.masks import dense_mask, flex_mask
from tests.draft.drafts import random_, tiny_batch, tiny_draft


def test_attention_is_a_softmax_over_what_the_mask_admits_with_heads_in_groups():
    random = random_()
    query = torch.randn(1, 4, 3, 8, generator=random)
    key, value = torch.randn(2, 1, 2, 5, 8, generator=random)
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 1, 1, 1, 1]]).bool()[None, None]
    mixed = attend(query, key, value, mask)
    for head in range(4):
        scores = query[0, head] @ key[0, head // 2].T / 8**0.5
        expected = scores.masked_fill(~mask[0, 0], float("-inf")).softmax(-1) @ value[0, head // 2]
        assert torch.allclose(mixed[0, head], expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # its meaning is tested here
def test_flex_attention_under_its_mask_gives_what_sdpa_gives():
    random = random_()
    anchors = Anchors(torch.tensor([[2, 6]]), torch.tensor([[True, True]]))
    query = torch.randn(1, 4, 6, 16, generator=random)
    key, value = torch.randn(2, 1, 2, 15, 16, generator=random)
    flex = flex_attention(query, key, value, block_mask=flex_mask(anchors, 3, 9), enable_gqa=True)
    assert torch.allclose(flex, attend(query, key, value, dense_mask(anchors, 3, 9)), atol=1e-6)


def test_under_autocast_query_key_and_value_are_of_one_dtype(monkeypatch):
    """Flex attention takes no others, and is not among what autocast casts."""
    seen = []

    def noted(query, key, value, mask):
        seen.append({query.dtype, key.dtype, value.dtype})
        return attend(query, key, value, mask)

    monkeypatch.setattr(attention, "attend", noted)
    draft, batch = tiny_draft(), tiny_batch()
    with torch.autocast("cpu", torch.bfloat16):
        draft(batch.states.bfloat16(), batch.blocks)
    assert seen == [{torch.bfloat16}] * 2
