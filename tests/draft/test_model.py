import pytest
import torch

from dspark_store.draft.anchors import Anchors, blocks_at
from dspark_store.draft.loss import LossWeights
from dspark_store.draft.model import Draft
from tests.draft.drafts import (
    MARKOV_KINDS,
    SETTINGS,
    VOCAB,
    WIDTH,
    all_logits,
    packed,
    sums_of,
    teacher_logits,
    tiny_batch,
    tiny_draft,
)


def outputs(draft, batch):
    return draft(batch.states, batch.blocks, batch.packing)


def logits_of(draft, states, blocks, packing=None):
    return all_logits(draft, draft(states, blocks, packing))


def loss_and_gradients(draft, batch):
    draft.zero_grad()
    loss = sums_of(draft, batch, 4.0).total(LossWeights())
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in draft.parameters())]


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_logits_teacher_and_confidence_have_a_value_for_each_slot(kind):
    draft, batch = tiny_draft(markov=kind), tiny_batch(num_anchors=8)
    output = outputs(draft, batch)
    assert all_logits(draft, output).shape == teacher_logits(draft, batch).shape == (2, 8, 4, VOCAB)
    assert output.confidence is not None
    assert output.confidence.shape == (2, 8, 4)
    assert all_logits(draft, output).isfinite().all()
    assert output.confidence.isfinite().all()


def test_a_draft_without_a_confidence_head_gives_none():
    assert outputs(tiny_draft(confidence=False), tiny_batch()).confidence is None


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_a_block_alone_after_the_context_before_its_anchor_is_what_it_is_among_others(kind):
    """Nothing of other blocks, of the anchor's own state or of what comes after it gets into a block."""
    draft, batch = tiny_draft(markov=kind), tiny_batch(width=20)
    together = all_logits(draft, outputs(draft, batch))
    for row, block in batch.blocks.anchors.kept.nonzero().tolist():
        anchor = int(batch.blocks.anchors.positions[row, block])
        alone = Anchors(torch.tensor([[anchor]]), torch.tensor([[True]]))
        blocks = blocks_at(alone, batch.ids[row, None], batch.mask[row, None], 4)
        logits = logits_of(draft, batch.states[row, None, :anchor], blocks)
        assert torch.allclose(logits[0, 0], together[row, block], atol=1e-5)


def test_the_context_before_an_anchor_is_seen():
    draft, batch = tiny_draft(), tiny_batch(torch.ones(1, 12, dtype=torch.long), num_anchors=11)
    assert batch.blocks.anchors.positions.tolist() == [[*range(11)]]
    states = batch.states.clone()
    states[0, 5] += 1
    changed = (draft(states, batch.blocks).hidden != outputs(draft, batch).hidden).flatten(2).any(2)
    assert changed.tolist() == [[anchor > 5 for anchor in range(11)]]


def test_a_packed_document_is_what_it_is_alone():
    packing = packed(9, 7)
    batch = tiny_batch(torch.ones(1, 16, dtype=torch.long), num_anchors=14, packing=packing)
    draft = tiny_draft()
    together = all_logits(draft, outputs(draft, batch))[0, -6:]
    anchors = Anchors(torch.arange(6)[None], torch.ones(1, 6, dtype=torch.bool))
    blocks = blocks_at(anchors, batch.ids[:, 9:], batch.mask[:, 9:], 4)
    live = blocks.supervised[0]
    assert torch.equal(live, batch.blocks.supervised[0, -6:])
    assert torch.allclose(logits_of(draft, batch.states[:, 9:], blocks)[0][live], together[live], atol=1e-5)


def test_a_row_of_one_document_gives_what_an_unpacked_one_gives():
    mask = torch.ones(1, 16, dtype=torch.long)
    draft, plain, one = tiny_draft(), tiny_batch(mask), tiny_batch(mask, packing=packed(16))
    both = [loss_and_gradients(draft, batch) for batch in (plain, one)]
    assert all(torch.equal(first, second) for first, second in zip(*both, strict=True))


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_what_no_block_can_see_changes_no_bit_of_loss_and_gradients(kind):
    """Context at or after the last anchor, last states that teach no slot that counts."""
    mask = torch.tensor([[0] * 3 + [1] * 5 + [0] * 4 + [1] * 3 + [0] * 5])
    draft, batch = tiny_draft(markov=kind), tiny_batch(mask, num_anchors=9)
    taught = batch.blocks.sources[batch.blocks.supervised].unique()
    states, last = batch.states.clone(), torch.zeros_like(batch.last)
    states[:, int(batch.blocks.anchors.positions.max()) :] = 0
    last[:, taught] = batch.last[:, taught]
    trimmed = type(batch)(batch.ids, batch.mask, states, last, batch.blocks)
    both = [loss_and_gradients(draft, each) for each in (batch, trimmed)]
    assert all(torch.equal(first, second) for first, second in zip(*both, strict=True))


def test_a_batch_without_supervision_gives_no_loss_and_no_gradient():
    values = loss_and_gradients(tiny_draft(), tiny_batch(torch.zeros(2, 8, dtype=torch.long)))
    assert all(not value.any() for value in values)


def test_the_targets_tables_are_neither_trained_nor_saved():
    draft = tiny_draft()
    assert not draft.embed.requires_grad
    assert not draft.head.requires_grad
    assert {"embed", "head", "bias"}.isdisjoint(draft.state_dict())
    values = loss_and_gradients(draft, tiny_batch(num_anchors=8))
    assert all(value.any() for value in values)


def test_the_same_seed_gives_the_same_bits():
    both = [loss_and_gradients(tiny_draft(seed=3), tiny_batch()) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*both, strict=True))


def test_twenty_steps_on_one_batch_lower_the_loss():
    draft, batch = tiny_draft(), tiny_batch(num_anchors=8)
    optimizer = torch.optim.AdamW(draft.trainable(), lr=5e-3)
    losses = []
    for _ in range(20):
        losses.append(float(loss_and_gradients(draft, batch)[0]))
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_scale_cap_and_bias_of_the_targets_head_are_the_drafts():
    draft = tiny_draft(logit_scale=0.5, final_logit_softcapping=2.0, head_bias=True)
    hidden = torch.randn(3, WIDTH)
    logits = 0.5 * (hidden @ draft.head.T + draft.bias)
    assert torch.allclose(draft.head_logits(hidden), 2.0 * torch.tanh(logits / 2.0), atol=1e-6)


def test_the_embedding_is_scaled_as_the_target_scales_it():
    draft = tiny_draft(embedding_scale=4.0)
    assert torch.equal(draft.embedded(torch.tensor([5])), 4.0 * draft.embed[[5]])


def test_the_teacher_is_the_head_over_the_state_before_the_label():
    draft, batch = tiny_draft(), tiny_batch()
    row, block, slot = batch.blocks.supervised.nonzero()[0].tolist()
    state = batch.last[row, batch.blocks.anchors.positions[row, block] + slot]
    teacher = teacher_logits(draft, batch)
    assert torch.allclose(teacher[row, block, slot], draft.head @ state, atol=1e-5)
    assert not teacher.requires_grad


def test_a_draft_in_bf16_still_learns():
    draft, batch = tiny_draft().to(torch.bfloat16), tiny_batch(num_anchors=8)
    batch = type(batch)(batch.ids, batch.mask, batch.states.bfloat16(), batch.last.bfloat16(), batch.blocks)
    values = loss_and_gradients(draft, batch)
    assert values[0].dtype is torch.float32
    assert all(value.isfinite().all() for value in values)


def test_tables_of_another_shape_are_refused():
    table = torch.zeros(VOCAB, WIDTH)
    with pytest.raises(ValueError, match=r"head has shape \(37, 15\), the draft expects \(37, 16\)"):
        Draft(SETTINGS, table, table[:, 1:])
    with pytest.raises(ValueError, match="head_bias is False"):
        Draft(SETTINGS, table, table, torch.zeros(VOCAB))


def test_a_tied_head_stays_one_tensor_with_the_embedding():
    table = torch.randn(VOCAB, WIDTH)
    tied = Draft(SETTINGS, table, table).to(torch.bfloat16)
    assert tied.head is tied.embed
    assert tied.head.dtype is torch.bfloat16
    untied = Draft(SETTINGS, table, table.clone()).to(torch.bfloat16)
    assert untied.head.data_ptr() != untied.embed.data_ptr()


def test_blocks_of_packed_documents_stand_at_positions_of_their_own_document():
    packing = packed(5, 5)
    draft, batch = tiny_draft(), tiny_batch(torch.ones(1, 10, dtype=torch.long), packing=packing)
    anchors = Anchors(torch.tensor([[1, 6]]), torch.ones(1, 2, dtype=torch.bool))
    blocks = blocks_at(anchors, batch.ids, batch.mask, 4, packing.doc_remaining)
    seen = []
    draft.backbone.register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    draft(batch.states, blocks, packing)
    assert seen[0].tolist() == [[0, 1, 2, 3, 4] * 2 + [1, 2, 3, 4] * 2]


@pytest.mark.parametrize("casts", [[torch.bfloat16], [torch.float16, torch.bfloat16]])
def test_rotations_stay_exact_when_the_draft_is_cast(casts):
    draft, batch = tiny_draft(), tiny_batch()
    for dtype in casts:
        draft = draft.to(dtype)
    seen = []
    draft.backbone.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    draft(batch.states.bfloat16(), batch.blocks)
    cos, sin = seen[0]
    frequencies = SETTINGS.rope_theta ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert cos.dtype is sin.dtype is torch.float32
    turned = torch.atan2(sin[0, 0, 1, :4].double(), cos[0, 0, 1, :4].double())  # position 1: the frequencies
    assert torch.allclose(turned, frequencies, rtol=1e-6)
