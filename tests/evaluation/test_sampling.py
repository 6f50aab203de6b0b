"""Speculative sampling: upstream's row L20, and that the text is drawn as the target would draw it."""

import pytest
import torch

from dspark_store.evaluation.sampling import Proposal, Sampler, residual

TARGET, DRAFT = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])


def test_at_temperature_0_the_likeliest_token_has_it_all():
    sampler = Sampler()
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    rows = sampler.probabilities(logits)
    assert rows.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert [sampler.draw(row) for row in rows] == [1, 0]


def test_at_temperature_1_tokens_are_drawn_from_the_softmax():
    sampler = Sampler(1.0)
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    rows = sampler.probabilities(logits)
    assert torch.allclose(rows, logits.softmax(-1))
    assert {sampler.draw(row) for row in rows for _ in range(200)} == set(range(7))


def test_a_high_temperature_evens_out_and_a_low_one_sharpens():
    logits = torch.tensor([1.0, 2.0, 4.0])
    tops = [float(Sampler(temperature).probabilities(logits).max()) for temperature in (100.0, 1.0, 0.1)]
    assert tops == pytest.approx([0.34, 0.8438, 1.0], abs=0.005)


@pytest.mark.parametrize("temperature", [1e-38, 1e-300, 1e30])
def test_any_other_temperature_draws(temperature):
    sampler = Sampler(temperature)
    row = sampler.probabilities(torch.tensor([1.0, 80.0, 4.0]))
    assert float(row.sum()) == pytest.approx(1)
    assert sampler.draw(row) in range(3)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_cannot_be_is_refused(seed):
    with pytest.raises(ValueError, match=r"expected 0 to 2\*\*64 - 1"):
        Sampler(seed=seed)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_cannot_be_is_refused(temperature):
    with pytest.raises(ValueError, match="expected a finite number, 0 or more"):
        Sampler(temperature)


def test_the_residual_is_what_the_target_gives_more():
    assert residual(TARGET, DRAFT).tolist() == pytest.approx([0.75, 0.25, 0.0])
    assert torch.equal(residual(TARGET, TARGET), TARGET)


@pytest.mark.parametrize(
    ("proposed", "chosen", "kept"),
    [([1, 2], [1, 2, 0], [1, 2, 0]), ([1, 0], [1, 2, 0], [1, 2]), ([0, 2], [1, 2, 0], [1]), ([], [2], [2])],
)
def test_greedily_tokens_are_kept_up_to_the_first_that_the_target_would_not_choose(proposed, chosen, kept):
    hot = torch.eye(3)
    assert Sampler().judge(Proposal(proposed, hot[proposed]), hot[chosen]) == kept


def test_kept_and_replaced_tokens_together_are_drawn_as_the_target_draws():
    """Two slots; the second of the target's rows is turned round, so that the slots cannot be taken for one another."""
    sampler, number = Sampler(1.0, seed=5), 20_000
    target = torch.stack([TARGET, TARGET.flip(0), TARGET])
    counts, kept = torch.zeros(2, 3), [0, 0]
    for _ in range(number):
        tokens = [sampler.draw(DRAFT), sampler.draw(DRAFT)]
        said = sampler.judge(Proposal(tokens, torch.stack([DRAFT, DRAFT])), target)
        kept[0] += len(said) > 1
        kept[1] += len(said) > 2
        for slot, token in enumerate(said[:2]):
            counts[slot, token] += 1
    assert counts[0].sum() == number
    assert counts[1].sum() == kept[0]
    near = 4 * 0.5 / kept[0] ** 0.5
    assert (counts[0] / number).tolist() == pytest.approx(TARGET.tolist(), abs=near)
    assert (counts[1] / kept[0]).tolist() == pytest.approx(TARGET.flip(0).tolist(), abs=near)
    assert kept[0] / number == pytest.approx(0.6, abs=near)  # the sum of the lesser of both, which is 1 - L1 / 2
    assert kept[1] / kept[0] == pytest.approx(0.9, abs=near)
