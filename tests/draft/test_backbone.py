import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dspark_store.draft import backbone
from dspark_store.draft.anchors import Anchors
from dspark_store.draft.backbone import RmsNorm, attend, dense_mask, flex_mask, rotary_angles, rotate
from tests.draft.drafts import packed, random_, tiny_batch, tiny_draft


def test_features_come_out_with_a_root_mean_square_of_one():
    features = RmsNorm(8, 0.0)(3 * torch.randn(5, 8, generator=random_()))
    assert torch.allclose(features.square().mean(-1), torch.ones(5), atol=1e-5)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_features(weight):
    features = torch.randn(3, 8, generator=random_()).bfloat16()
    normed = RmsNorm(8, 1e-6).to(weight)(features)
    assert normed.dtype is torch.bfloat16
    assert torch.equal(normed, RmsNorm(8, 1e-6)(features.float()).bfloat16())


def test_a_product_of_rotated_vectors_depends_on_their_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, generator=random_())

    def product(first, second):
        turned = [
            rotate(vector, *rotary_angles(torch.tensor([[position]]), 8, 10000.0))
            for vector, position in ((query, first), (key, second))
        ]
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(product(3, 1), product(42, 40), rtol=1e-4)
    assert not torch.allclose(product(3, 1), product(3, 2), rtol=1e-2)


def test_angles_are_exact_to_fp32():
    cos, sin = rotary_angles(torch.tensor([[4001]]), 8, 10000.0)
    angles = 4001 * 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    assert cos.dtype is sin.dtype is torch.float32
    assert torch.allclose(cos[0, 0, 0].double(), angles.cos().repeat(2), atol=5e-4)
    assert torch.allclose(sin[0, 0, 0].double(), angles.sin().repeat(2), atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotated_heads_keep_their_dtype_and_are_rounded_once(dtype):
    heads = torch.randn(1, 2, 3, 8, generator=random_()).to(dtype)
    angles = rotary_angles(torch.tensor([[0, 5, 900]]), 8, 10000.0)
    turned = rotate(heads, *angles)
    assert turned.dtype is dtype
    assert torch.equal(turned, rotate(heads.float(), *angles).to(dtype))


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

    monkeypatch.setattr(backbone, "attend", noted)
    draft, batch = tiny_draft(), tiny_batch()
    with torch.autocast("cpu", torch.bfloat16):
        draft(batch.states.bfloat16(), batch.blocks)
    assert seen == [{torch.bfloat16}] * 2
