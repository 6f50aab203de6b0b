"""How far a draft's distribution is from the text and from its teacher's, at the slots that count and at no other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_store.draft.blocks import Blocks
from dspark_store.draft.model import Draft, DraftOutput
from dspark_store.draft.pieces import PIECE_TOKENS, by_pieces


@dataclass(frozen=True, slots=True)
class SlotTerms:
    """Of each slot, 0 for one that does not count: all (B, N, K) fp32.

    ``cross_entropy`` is that of the draft to the label; ``distance``, from 0 to 2, is the L1 distance of the draft's
    probabilities to the teacher's. The teacher gets no gradient.
    """

    cross_entropy: Tensor
    distance: Tensor

    @classmethod
    def of(cls, terms: Tensor, blocks: Blocks) -> SlotTerms:
        """Put the terms (2, n) of the slots that count in their places."""
        counts = blocks.supervised
        crossed, distance = (terms.new_zeros(counts.shape).masked_scatter(counts, term) for term in terms)
        return cls(crossed, distance)

    @classmethod
    def of_logits(cls, draft: Tensor, teacher: Tensor, blocks: Blocks, chunk: int = PIECE_TOKENS) -> SlotTerms:
        """Compare logits (B, N, K, V) that are there already."""
        counts = blocks.supervised
        return cls.of(
            by_pieces(compared, chunk, draft[counts], teacher.detach()[counts], blocks.labels[counts]), blocks
        )


def slot_terms(draft: Draft, output: DraftOutput, last: Tensor, blocks: Blocks, chunk: int = PIECE_TOKENS) -> SlotTerms:
    """Compare what the draft makes of the slots with the text, and with the target's last hidden states (B, S, H).

    The logits of both are made of ``chunk`` slots at a time, and of no slot that does not count.
    """
    counts = blocks.supervised
    hidden, teacher, labels = output.hidden[counts], draft.teacher_states(last, blocks)[counts], blocks.labels[counts]

    def terms(hidden: Tensor, teacher: Tensor, labels: Tensor, *latents: Tensor) -> Tensor:
        with torch.no_grad():
            own = draft.head_logits(teacher)
        return compared(draft.slot_logits(hidden, *latents), own, labels)

    latents = () if output.latents is None else (output.latents[counts],)
    return SlotTerms.of(by_pieces(terms, chunk, hidden, teacher, labels, *latents), blocks)


def compared(draft: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Return (2, n) fp32: the cross-entropy of logits (n, V) to labels (n,), and their L1 distance to the teacher's."""
    logarithms = draft.float().log_softmax(-1)
    crossed = -logarithms.gather(-1, labels[:, None])[:, 0]
    distance = (logarithms.exp() - teacher.float().log_softmax(-1).exp()).abs().sum(-1)
    return torch.stack([crossed, distance])
