import math

import pytest
import torch
import torch.nn.functional as F

from dspark_store.draft.loss import (
    DraftCounts,
    LossWeights,
    compared,
    draft_counts,
    loss_sums,
    slot_terms,
    slot_weights,
)
from tests.draft.drafts import (
    DRAFT,
    MARKOV_KINDS,
    TEACHER,
    UNSURE,
    all_logits,
    hand_blocks,
    hand_sums,
    random_,
    sums_of,
    teacher_logits,
    terms_of_logits,
    tiny_batch,
    tiny_draft,
)

WIDE = 500


def logits():
    draft, teacher = torch.randn(2, 15, 11, generator=random_())
    return draft.requires_grad_(), teacher, torch.randint(11, (15,), generator=random_(2))


def test_distributions_without_overlap_are_two_apart():
    far = torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.0, 1000.0]])
    assert compared(*far, torch.tensor([1])).tolist() == [[1000.0], [2.0]]


def test_both_terms_and_their_gradients_are_those_of_their_definitions():
    draft, teacher, labels = logits()
    direct = torch.stack(
        [
            F.cross_entropy(draft, labels, reduction="none"),
            (draft.softmax(-1) - teacher.softmax(-1)).abs().sum(-1),
        ]
    )
    weights = torch.rand(2, 15, generator=random_(3))
    (expected,) = torch.autograd.grad((weights * direct).sum(), draft)
    terms = compared(draft, teacher, labels)
    (gradient,) = torch.autograd.grad((weights * terms).sum(), draft)
    assert torch.allclose(terms, direct, atol=1e-6)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_logits_in_bf16_are_compared_in_fp32():
    draft, teacher, labels = logits()
    terms = compared(draft.bfloat16(), teacher.bfloat16(), labels)
    assert terms.dtype is torch.float32
    assert torch.equal(terms, compared(draft.bfloat16().float(), teacher.bfloat16().float(), labels))


@pytest.mark.parametrize(("kind", "chunk"), [*zip(MARKOV_KINDS, [1, 2, 7, 128], strict=True)])
def test_slots_in_pieces_are_compared_as_their_whole_logits_are(kind, chunk):
    draft, batch = tiny_draft(markov=kind), tiny_batch()
    output, parameters = draft(batch.states, batch.blocks), list(draft.parameters())
    weights = torch.rand(2, *batch.blocks.labels.shape, generator=random_(3))

    def gradients(terms):
        total = (weights * torch.stack([terms.cross_entropy, terms.distance])).sum()
        return torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)

    whole = terms_of_logits(all_logits(draft, output), teacher_logits(draft, batch), batch.blocks)
    pieces = slot_terms(draft, output, batch.last, batch.blocks, chunk)
    assert torch.allclose(pieces.distance, whole.distance, atol=1e-5)
    assert torch.allclose(pieces.cross_entropy, whole.cross_entropy, atol=1e-5)
    for gradient, expected in zip(gradients(pieces), gradients(whole), strict=True):
        assert torch.allclose(gradient, expected, atol=1e-5)


def test_a_slot_that_does_not_count_has_no_terms():
    draft, batch = tiny_draft(), tiny_batch()
    terms = slot_terms(draft, draft(batch.states, batch.blocks), batch.last, batch.blocks)
    counts = batch.blocks.supervised
    assert counts.any()
    assert not counts.all()
    assert torch.equal(terms.distance > 0, counts)
    assert torch.equal(terms.cross_entropy > 0, counts)


def test_the_teacher_is_not_taught():
    draft, batch = tiny_draft(), tiny_batch()
    last = batch.last.requires_grad_()
    slot_terms(draft, draft(batch.states, batch.blocks), last, batch.blocks).distance.sum().backward()
    assert last.grad is None
    assert all(parameter.grad is not None for parameter in draft.backbone.parameters())


def test_no_vocabulary_is_made_or_kept_for_more_slots_than_a_piece_has(monkeypatch):
    """Slots that do not count get no logits either."""
    draft, batch = tiny_draft(vocab_size=WIDE), tiny_batch(num_anchors=40, width=40)
    counted = int(batch.blocks.supervised.sum())
    assert counted > 3 * 8
    made, saved, real = [], [], draft.head_logits

    def made_of(hidden):
        made.append(len(hidden))
        return real(hidden)

    def noted(tensor):
        saved.append(tensor.numel())
        return tensor

    monkeypatch.setattr(draft, "head_logits", made_of)

    output = draft(batch.states, batch.blocks)
    parameters = {parameter.numel() for parameter in draft.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        terms = slot_terms(draft, output, batch.last, batch.blocks, 8)
    assert sum(made) == 2 * counted  # the draft's own and the teacher's
    assert max(made) == 8
    assert max(set(saved) - parameters, default=0) < 8 * WIDE
    terms.distance.sum().backward()


def test_in_bf16_the_gradients_of_pieces_are_summed_in_fp32():
    """A copy of the weights that autocast kept for all pieces would sum them in bf16: 100 pieces lose two digits."""
    draft, batch = tiny_draft(), tiny_batch(num_anchors=40, width=120, rows=4)
    exact, rounded = (gradient_of_markov(draft, batch, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert int(batch.blocks.supervised.sum()) > 100
    assert float((rounded - exact).norm() / exact.norm()) < 0.01


def gradient_of_markov(draft, batch, dtype):
    draft.zero_grad()
    output = draft(batch.states, batch.blocks)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        terms = slot_terms(draft, output, batch.last, batch.blocks, 1)
    terms.cross_entropy.sum().backward()
    return draft.markov.to_vocab.weight.grad.clone()


ALL = hand_blocks(1, 1, 1)
TWO = hand_blocks(1, 1, 0)


@pytest.mark.parametrize(("gamma", "blocks"), [(None, ALL), (4.0, TWO), (0.0, ALL), (-1.0, TWO)])
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
    teacher = teacher_logits(draft, batch)
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


def counted(blocks, confidence=UNSURE, gamma=None):
    return draft_counts(confidence, hand_sums(blocks, gamma, confidence=confidence), blocks)


def tiny_counts(seed):
    batch, draft = tiny_batch(seed=seed), tiny_draft()
    output = draft(batch.states, batch.blocks)
    sums = loss_sums(slot_terms(draft, output, batch.last, batch.blocks), output.confidence, batch.blocks, 4.0)
    return draft_counts(output.confidence, sums, batch.blocks), sums, batch.blocks


def test_the_rates_of_the_case_worked_out_by_hand():
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
