import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.cli.train import parse_arguments
from dspark_store.draft.loss import DraftCounts
from dspark_store.readers.loader import CacheLoader
from dspark_store.training import learner as learner_module
from dspark_store.training.learner import TERMS, Judged, Schedule, warmup_steps
from dspark_store.training.loop import Training
from dspark_store.training.ranks import Ranks
from tests.training.runs import flags, metrics, run


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.04, 100, 20), (0.04, 10000, 400), (0, 100, 1), (-1, 100, 1)])
def test_the_warm_up_is_a_share_of_the_steps_but_not_too_short(ratio, total, steps):
    assert warmup_steps(ratio, total) == steps


@pytest.mark.parametrize(("ratio", "steps"), [(0.01, 5), (0.5, 50)])
def test_another_least_warm_up_may_be_given(ratio, steps):
    assert warmup_steps(ratio, 100, least=5) == steps


def test_the_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    schedule = Schedule(total=14, warmup=4, least=0.1)
    assert [schedule.multiplier(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.multiplier(9) == pytest.approx(0.55)
    assert schedule.multiplier(14) == pytest.approx(0.1)


@given(st.integers(1, 500), st.integers(1, 100), st.floats(0, 1))
def test_the_multiplier_stays_between_nothing_and_one_and_does_not_rise_again(total, warmup, least):
    schedule = Schedule(total, warmup, least)
    values = [schedule.multiplier(step) for step in range(total + 2)]
    assert all(0 < value <= 1 for value in values[:warmup])
    assert all(least - 1e-9 <= value <= 1 for value in values[warmup:])
    assert all(later <= value for value, later in zip(values[warmup:], values[warmup + 1 :], strict=False))


ALONE = Ranks(0, 1, torch.device("cpu"))


def judged(loss, accept, slots, tokens=0, blocks=0):
    """A micro-batch of blocks of two slots, without a confidence head."""
    terms = torch.tensor([loss, *[0.0] * (len(TERMS) - 1)], dtype=torch.float64)
    numbers = [*accept, *slots, tokens, blocks, 0, 0, 0, 0]
    return Judged(1, terms, DraftCounts.of_vector(torch.tensor(numbers, dtype=torch.float64)))


def test_losses_are_averaged_over_micro_batches_and_rates_are_ratios_of_sums():
    window = judged(1.0, [1, 0], [1, 0], tokens=3, blocks=2) + judged(3.0, [2, 0], [3, 0], tokens=2, blocks=1)
    figures = window.figures(ALONE)
    assert figures["loss"] == 2.0
    assert (figures["accept"], figures["tau"]) == (3 / 4, 5 / 3)
    assert "accept@1" not in figures  # there was nothing to count
    assert "confidence_error" not in figures


class Doubled(Ranks):
    """Two ranks that had the same."""

    def total(self, values):
        return 2 * values


def test_ranks_are_summed_before_anything_is_divided():
    part = judged(1.0, [1, 0], [2, 0], tokens=3, blocks=2)
    assert part.figures(Doubled(0, 2, torch.device("cpu"))) == part.figures(ALONE)


def test_sums_travel_as_one_vector_bit_by_bit():
    part = judged(0.1, [1 / 3, 0], [2, 0], tokens=3, blocks=2) + judged(0.2, [0, 1 / 7], [1, 1])
    again = Judged.of_vector(torch.tensor(part.vector().tolist(), dtype=torch.float64))
    assert again.micro_batches == 2
    assert torch.equal(again.vector(), part.vector())


@pytest.mark.parametrize("length", [0, 6, 9])
def test_a_vector_of_another_length_is_no_sum(length):
    with pytest.raises(ValueError, match=f"a vector of {length} numbers holds no counts"):
        DraftCounts.of_vector(torch.zeros(length))


def test_counts_of_blocks_of_other_sizes_do_not_add_up():
    with pytest.raises(ValueError, match="blocks of 1 and of 2 slots do not add up"):
        _ = DraftCounts.of_vector(torch.zeros(8)) + DraftCounts.of_vector(torch.zeros(10))


def test_a_line_is_of_the_steps_since_the_one_before(store, tmp_path):
    each, pairs = (
        metrics(run(tmp_path / str(every), "--store", store, "--log-every", every, "--max-steps", 6))
        for every in (1, 2)
    )
    assert [line["step"] for line in pairs] == [2, 4, 6]
    for line, first, second in zip(pairs, each[::2], each[1::2], strict=True):
        assert line["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2, rel=1e-12)


def test_validation_sums_over_batches_and_lets_the_draft_go_on_training(store, tmp_path, monkeypatch):
    """Four slots of six are accepted in one batch, none of six in the other."""
    parts = [judged(1.0, [3, 1], [4, 2]), judged(2.0, [0, 0], [6, 0])]
    more = ("--validation-fraction", 0.5, "--block-size", 2)
    config = parse_arguments(flags(tmp_path / "run", "--store", store, *more))
    training, modes = Training(config, ALONE, None), []
    assert training.data.validation is not None
    batch = next(iter(training.data.validation))
    monkeypatch.setattr(CacheLoader, "__iter__", lambda loader: iter([batch, batch]))
    draft = training.learner.draft

    def next_part(*given):
        modes.append(draft.training)
        return parts[len(modes) - 1]

    monkeypatch.setattr(learner_module, "_judged", next_part)
    figures = training.validate()
    assert (figures["accept"], figures["accept@0"], figures["accept@1"]) == (4 / 12, 3 / 10, 0.5)
    assert figures["loss"] == 1.5
    assert modes == [False, False]
    assert draft.training
    assert training._journal is not None
    training._journal.close()
