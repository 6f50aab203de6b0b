import pytest
import torch

from dspark_store.draft.loss import loss_sums, slot_terms
from dspark_store.draft.metrics import DraftCounts, draft_counts
from tests.draft.drafts import UNSURE, hand_blocks, hand_sums, tiny_batch, tiny_draft


def counted(blocks, confidence=UNSURE, gamma=None):
    return draft_counts(confidence, hand_sums(blocks, gamma, confidence=confidence), blocks)


def tiny_counts(seed):
    batch, draft = tiny_batch(seed=seed), tiny_draft()
    output = draft(batch.states, batch.blocks)
    sums = loss_sums(slot_terms(draft, output, batch.last, batch.blocks), output.confidence, batch.blocks, 4.0)
    return draft_counts(output.confidence, sums, batch.blocks), sums, batch.blocks


def test_the_case_worked_out_by_hand():
    rates = counted(hand_blocks(1, 1, 1)).rates()
    assert rates["tau"] == pytest.approx(1.875)
    assert rates["accept"] == rates["accept@2"] == pytest.approx(0.5)
    errors = (rates["confidence_error"], rates["confidence_bias"], rates["prefix_bias"])
    assert errors == pytest.approx((0, 0, 0), abs=1e-6)


def test_a_slot_that_does_not_count_gives_no_tokens():
    rates = counted(hand_blocks(1, 1, 0)).rates()
    assert rates["tau"] == pytest.approx(1.75)
    assert "accept@2" not in rates


def test_confidence_that_is_too_high_is_told():
    rates = counted(hand_blocks(1, 1, 1), torch.tensor([[[1000.0, 1000.0, 0.0]]])).rates()
    assert rates["confidence_error"] == rates["confidence_bias"] == pytest.approx(1 / 3)
    assert rates["prefix_bias"] == pytest.approx((0.5 + 0.75 + (0.5 - 0.125)) / 3)


def test_without_a_confidence_head_nothing_is_told_of_it():
    assert "confidence_error" not in counted(hand_blocks(1, 1, 1), None).rates()


def test_tau_is_one_and_the_running_products_of_acceptance():
    counts, sums, blocks = tiny_counts(0)
    total, live = 0.0, 0
    for accept, supervised in zip(sums.accept.flatten(0, 1), blocks.supervised.flatten(0, 1), strict=True):
        if not supervised.any():
            continue
        product, live, total = 1.0, live + 1, total + 1
        for rate, counts_here in zip(accept.tolist(), supervised.tolist(), strict=True):
            product *= rate * counts_here
            total += product
    assert counts.rates()["tau"] == pytest.approx(total / live)


def test_sums_are_added_before_they_are_divided():
    first, second = (tiny_counts(seed)[0] for seed in (0, 1))
    both = (first + second).rates()
    assert both["tau"] == pytest.approx(float((first.tokens + second.tokens) / (first.blocks + second.blocks)))
    assert both["accept@1"] == pytest.approx(float((first.accept + second.accept)[1] / (first.slots + second.slots)[1]))


def test_sums_travel_as_one_vector():
    counts = tiny_counts(0)[0]
    assert counts.vector().shape == (2 * 4 + 6,)
    assert DraftCounts.of_vector(counts.vector()).rates() == counts.rates()


def test_nothing_counted_gives_no_figures():
    assert counted(hand_blocks(0, 0, 0)).rates() == {}


def test_the_confidence_sums_carry_the_slots_weights():
    counts = counted(hand_blocks(1, 1, 1), gamma=4.0)
    assert float(counts.weight) == pytest.approx(2.385331, abs=1e-6)


def test_counts_hold_no_graph():
    assert not tiny_counts(0)[0].vector().requires_grad
    assert torch.equal(tiny_counts(0)[0].vector(), tiny_counts(0)[0].vector())
