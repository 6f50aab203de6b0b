import pytest
import torch

from dspark_store.draft.norm import RmsNorm
from tests.draft.drafts import random_


def test_features_come_out_with_a_root_mean_square_of_one():
    features = RmsNorm(8, 0.0)(3 * torch.randn(5, 8, generator=random_()))
    assert torch.allclose(features.square().mean(-1), torch.ones(5), atol=1e-5)


def test_the_weight_scales_each_feature():
    norm = RmsNorm(2, 0.0)
    norm.weight.data = torch.tensor([2.0, -1.0])
    assert torch.allclose(norm(torch.tensor([3.0, 3.0])), torch.tensor([2.0, -1.0]))


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_features(weight):
    features = torch.randn(3, 8, generator=random_()).bfloat16()
    normed = RmsNorm(8, 1e-6).to(weight)(features)
    assert normed.dtype is torch.bfloat16
    assert torch.equal(normed, RmsNorm(8, 1e-6)(features.float()).bfloat16())
