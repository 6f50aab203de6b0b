"""What a draft is judged by: acceptance by slot, tokens per step, and how honest its confidence is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_store.draft.anchors import Blocks
from dspark_store.draft.loss import LossSums


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Sums of a draft's judgement, to be added over batches and ranks before anything is divided; all fp64.

    ``accept`` and ``slots`` (K,) are the acceptance and the number of supervised slots at each place of a block.
    ``tokens`` sums, over ``blocks`` live blocks, the tokens that a step of the target is expected to give. The
    confidence sums carry the slots' weights, whose sum is ``weight``; they are 0 without that head.
    """

    accept: Tensor
    slots: Tensor
    tokens: Tensor
    blocks: Tensor
    confidence_error: Tensor
    confidence_bias: Tensor
    prefix_bias: Tensor
    weight: Tensor

    def __add__(self, other: DraftCounts) -> DraftCounts:
        if self.slots.shape != other.slots.shape:
            raise ValueError(f"counts of blocks of {len(self.slots)} and of {len(other.slots)} slots do not add up")
        return DraftCounts.of_vector(self.vector() + other.vector())

    def vector(self) -> Tensor:
        """Return all sums as one vector (2 K + 6,), for a single all-reduce."""
        scalars = (self.tokens, self.blocks, self.confidence_error, self.confidence_bias, self.prefix_bias, self.weight)
        return torch.cat([self.accept, self.slots, torch.stack(scalars)])

    @classmethod
    def of_vector(cls, vector: Tensor) -> DraftCounts:
        """Return the sums that `vector` made one vector of; ValueError for a length that it does not make."""
        if vector.numel() < 8 or vector.numel() % 2:
            raise ValueError(f"a vector of {vector.numel()} numbers holds no counts: expected 2 K + 6")
        slots = (vector.numel() - 6) // 2
        return cls(vector[:slots], vector[slots : 2 * slots], *vector[2 * slots :].unbind())

    def rates(self) -> dict[str, float]:
        """Return the figures, leaving out those of which there was nothing to count.

        ``accept`` over all slots and ``accept@k`` by place from 0, ``tau``: tokens per step, the target's own included;
        with a confidence head also ``confidence_error``, ``confidence_bias`` and ``prefix_bias``, the bias of the
        product of confidences up to a slot.
        """
        figures = {"accept": (self.accept.sum(), self.slots.sum()), "tau": (self.tokens, self.blocks)}
        for place, pair in enumerate(zip(self.accept, self.slots, strict=True)):
            figures[f"accept@{place}"] = pair
        for name in ("confidence_error", "confidence_bias", "prefix_bias"):
            figures[name] = (getattr(self, name), self.weight)
        return {name: float(sum_ / count) for name, (sum_, count) in figures.items() if count > 0}


def draft_counts(confidence: Tensor | None, sums: LossSums, blocks: Blocks) -> DraftCounts:
    """Count one micro-batch, given the logits (B, N, K) of its confidence."""
    accept, live = sums.accept.double(), blocks.live
    zero = accept.new_zeros(())
    error = bias = prefix = weight = zero
    if confidence is not None:
        weights = sums.slot_weights.double()
        predicted = confidence.detach().double().sigmoid()
        error = (weights * (predicted - accept).abs()).sum()
        bias = (weights * (predicted - accept)).sum()
        prefix = (weights * (predicted.cumprod(2) - accept.cumprod(2))).sum()
        weight = weights.sum()
    return DraftCounts(
        accept=accept.sum((0, 1)),
        slots=blocks.supervised.double().sum((0, 1)),
        tokens=((1 + accept.cumprod(2).sum(2)) * live).sum(),
        blocks=live.sum().double(),
        confidence_error=error,
        confidence_bias=bias,
        prefix_bias=prefix,
        weight=weight,
    )
