import math

import pytest
import torch

from dspark_store.draft.loss import LossWeights, slot_weights
from tests.draft.drafts import all_logits, sums_of, tiny_batch, tiny_draft
from tests.draft.oracle import DRAFT, TEACHER, hand_blocks, hand_sums

ALL = hand_blocks(1, 1, 1)
TWO = hand_blocks(1, 1, 0)


@pytest.mark.parametrize("gamma", [None, 4.0, 0.0, -1.0])
@pytest.mark.parametrize("blocks", [ALL, TWO])
def test_the_case_worked_out_by_hand(gamma, blocks):
    sums = hand_sums(blocks, gamma)
    means = sums.means()
    assert float(means["cross_entropy"]) == pytest.approx(math.log(4 / 3), abs=1e-6)
    assert float(means["distance"]) == pytest.approx(1.0, abs=2e-6)
    assert float(means["confidence"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(sums.total(LossWeights())) == pytest.approx(1.621915, abs=3e-6)
    halves = [0.5 * counts for counts in blocks.supervised.flatten().tolist()]
    assert sums.accept.flatten().tolist() == pytest.approx(halves, abs=1e-6)


def test_slots_further_from_the_anchor_count_less():
    assert float(slot_weights(ALL.supervised, 4.0).sum()) == pytest.approx(2.385331, abs=1e-6)
    assert slot_weights(ALL.supervised, 2.0).flatten().tolist() == pytest.approx(
        [math.exp(-slot / 2) for slot in range(3)]
    )


def test_a_slot_that_does_not_count_is_in_no_sum():
    far = DRAFT.clone()
    far[0, 0, 2] = torch.tensor([-50.0, 50.0])
    sums = [hand_sums(TWO, logits=logits, confidence=None) for logits in (far, DRAFT)]
    assert [float(each.total(LossWeights())) for each in sums] == pytest.approx([0.928768] * 2, abs=3e-6)
    assert float(sums[0].weight) == 2


def test_cross_entropy_alone_is_its_mean_over_supervised_slots():
    batch = tiny_batch()
    draft = tiny_draft().requires_grad_(False)
    loss = sums_of(draft, batch).total(LossWeights(cross_entropy=1.0, distance=0.0, confidence=0.0))
    logits = all_logits(draft, draft(batch.states, batch.blocks))
    counts = batch.blocks.supervised
    labels = batch.blocks.labels[counts]
    each = -logits[counts].log_softmax(-1)[torch.arange(len(labels)), labels]
    assert float(loss) == pytest.approx(float(each.mean()), rel=1e-5)


def test_a_draft_that_is_its_teacher_has_no_distance():
    sums = hand_sums(ALL, logits=TEACHER.clone(), confidence=None)
    assert float(sums.total(LossWeights(cross_entropy=0.0, distance=1.0))) == 0.0
    assert sums.accept.flatten().tolist() == [1.0] * 3


def test_acceptance_is_one_less_the_total_variation():
    batch, draft = tiny_batch(), tiny_draft()
    logits = all_logits(draft, draft(batch.states, batch.blocks))
    teacher = draft.teacher_logits(batch.last, batch.blocks)
    overlap = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    assert torch.allclose(sums_of(draft, batch).accept, overlap * batch.blocks.supervised, atol=1e-5)


def test_confidence_is_taught_the_acceptance_and_does_not_teach_the_draft():
    confidence = torch.zeros(1, 1, 3, requires_grad=True)
    logits = DRAFT.clone().requires_grad_()
    sums = hand_sums(ALL, logits=logits, confidence=confidence)
    only = sums.total(LossWeights(cross_entropy=0.0, distance=0.0))
    (gradient,) = torch.autograd.grad(only, confidence, retain_graph=True)
    assert float(gradient.abs().max()) < 1e-6  # sigmoid(0) is the acceptance already
    (none,) = torch.autograd.grad(only, logits)
    assert not none.any()


def test_ranks_together_give_the_gradient_of_all_slots_together():
    """Two ranks of unlike numbers of slots: averaged losses over the ranks' common weight are the global ratio."""
    parts = [hand_sums(TWO, logits=torch.tensor([0.9, 0.1]).log().expand(1, 1, 3, 2)), hand_sums(ALL)]
    common = torch.stack([part.weight for part in parts]).mean()
    averaged = sum(float(part.total(LossWeights(), common)) for part in parts) / 2
    terms = sum(float(part.total(LossWeights())) * float(part.weight) for part in parts)
    assert averaged == pytest.approx(terms / 5, rel=1e-5)


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="weight of distance must be >= 0, got -1"):
        LossWeights(distance=-1)
