import pytest
import torch

from dspark_store.draft.rotary import rotary_angles, rotate
from tests.draft.drafts import random_


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


def test_position_zero_is_not_turned():
    heads = torch.randn(1, 2, 1, 8, generator=random_())
    assert torch.equal(rotate(heads, *rotary_angles(torch.zeros(1, 1), 8, 10000.0)), heads)
