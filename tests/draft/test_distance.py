import pytest
import torch
import torch.nn.functional as F

from dspark_store.draft.distance import cross_entropy, l1_distance
from tests.draft.drafts import random_


def logits():
    draft, teacher = torch.randn(2, 3, 5, 11, generator=random_())
    return draft.requires_grad_(), teacher


def test_equal_logits_are_no_distance_apart():
    draft, _ = logits()
    assert not l1_distance(draft, draft).any()


def test_distributions_without_overlap_are_two_apart():
    far = torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.0, 1000.0]])
    assert l1_distance(*far).tolist() == [2.0]


@pytest.mark.parametrize("chunk", [1, 2, 7, 128])
def test_the_size_of_a_chunk_changes_neither_value_nor_gradient(chunk):
    draft, teacher = logits()
    direct = (draft.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    (expected,) = torch.autograd.grad((direct**2).sum(), draft)
    distance = l1_distance(draft, teacher, chunk)
    (gradient,) = torch.autograd.grad((distance**2).sum(), draft)
    assert torch.allclose(distance, direct, atol=1e-6)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_the_teacher_is_not_taught():
    draft, teacher = logits()
    l1_distance(draft, teacher.requires_grad_()).sum().backward()
    assert teacher.grad is None
    assert draft.grad is not None


def test_logits_in_bf16_are_compared_in_fp32():
    draft, teacher = (each.detach().bfloat16() for each in logits())
    distance = l1_distance(draft, teacher)
    assert distance.dtype is torch.float32
    assert torch.equal(distance, l1_distance(draft.float(), teacher.float()))


@pytest.mark.parametrize("chunk", [1, 4, 15, 128])
def test_cross_entropy_by_pieces_is_that_of_all_tokens_at_once(chunk):
    draft, _ = logits()
    labels = torch.randint(11, (3, 5), generator=random_(2))
    direct = F.cross_entropy(draft.flatten(0, -2), labels.flatten(), reduction="none").view(3, 5)
    weights = torch.rand(3, 5, generator=random_(3))
    (expected,) = torch.autograd.grad((weights * direct).sum(), draft)
    crossed = cross_entropy(draft, labels, chunk)
    (gradient,) = torch.autograd.grad((weights * crossed).sum(), draft)
    assert torch.equal(crossed, direct)
    assert torch.equal(gradient, expected)


def test_what_is_made_of_a_whole_vocabulary_is_not_kept_for_the_backward_pass():
    """Of 64 tokens in pieces of 8, nothing of the logits' shape is saved but the logits."""
    draft = torch.randn(64, 100, generator=random_()).requires_grad_()
    teacher, labels = torch.randn(64, 100, generator=random_(1)), torch.zeros(64, dtype=torch.long)
    saved = []

    def noted(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        (cross_entropy(draft, labels, 8) + l1_distance(draft, teacher, 8)).sum()
    assert max(saved, default=0) <= 8 * 100
