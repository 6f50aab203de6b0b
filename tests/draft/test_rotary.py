import torch

from dspark_store.draft.rotary import rotary_angles, rotate
from tests.draft.drafts import random_


def test_a_product_of_rotated_vectors_depends_on_their_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, generator=random_())

    def product(first, second):
        turned = [
            rotate(vector, *rotary_angles(torch.tensor([[position]]), 8, 10000.0, torch.float32))
            for vector, position in ((query, first), (key, second))
        ]
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(product(3, 1), product(42, 40), rtol=1e-4)
    assert not torch.allclose(product(3, 1), product(3, 2), rtol=1e-2)


def test_angles_are_made_in_fp32_whatever_the_dtype():
    positions = torch.tensor([[4001]])
    cos, _ = rotary_angles(positions, 8, 10000.0, torch.bfloat16)
    exact = torch.cos(4001 * 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4))
    assert cos.dtype is torch.bfloat16
    assert torch.allclose(cos[0, 0, 0, :4].double(), exact, atol=0.005)


def test_position_zero_is_not_turned():
    heads = torch.randn(1, 2, 1, 8, generator=random_())
    assert torch.equal(rotate(heads, *rotary_angles(torch.zeros(1, 1), 8, 10000.0, torch.float32)), heads)
