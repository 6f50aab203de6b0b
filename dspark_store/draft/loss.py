"""The loss: cross-entropy to the labels, distance to the teacher, and the confidence's own error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_store.draft.blocks import Blocks
from dspark_store.draft.distance import SlotTerms

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class LossWeights:
    """What each term counts, and how fast slots further from the anchor count less: exp(-k / gamma)."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    gamma: float | None = None

    def __post_init__(self) -> None:
        for name in ("cross_entropy", "distance", "confidence"):
            if getattr(self, name) < 0:
                raise ValueError(f"the weight of {name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LossSums:
    """The terms of one micro-batch, summed and not yet divided.

    ``weight`` is the sum of the slots' weights, which divides all terms. ``accept`` (B, N, K), detached, is how likely
    speculative sampling is to accept each slot's token, 0 for one that does not count, ``slot_weights`` (B, N, K) fp32
    what the slot counts.
    """

    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor | None
    weight: Tensor
    accept: Tensor
    slot_weights: Tensor

    def total(self, weights: LossWeights, weight: Tensor | None = None) -> Tensor:
        """Return the loss. ``weight`` is the sum of weights of all ranks together, times one over their number.

        Averaged over ranks, as DistributedDataParallel averages gradients, it is then the ratio of the sums over all
        ranks. Without any supervised token it is 0, and so are its gradients.
        """
        over = (self.weight if weight is None else weight) + _EPSILON
        loss = weights.cross_entropy * self.cross_entropy + weights.distance * self.distance
        if self.confidence is not None:
            loss = loss + weights.confidence * self.confidence
        return loss / over

    def means(self) -> dict[str, Tensor]:
        """Return each term's own mean, over this micro-batch."""
        over = self.weight.detach() + _EPSILON
        terms = {"cross_entropy": self.cross_entropy, "distance": self.distance}
        if self.confidence is not None:
            terms["confidence"] = self.confidence
        return {name: term.detach() / over for name, term in terms.items()}


def slot_weights(supervised: Tensor, gamma: float | None) -> Tensor:
    """Return (B, N, K) fp32: 0 for slots that do not count, else exp(-k / gamma), 1 without a gamma above 0."""
    weights = supervised.float()
    if gamma is None or gamma <= 0:
        return weights
    slots = torch.arange(supervised.shape[-1], dtype=torch.float32, device=supervised.device)
    return weights * torch.exp(-slots / gamma)


def loss_sums(terms: SlotTerms, confidence: Tensor | None, blocks: Blocks, gamma: float | None = None) -> LossSums:
    """Return the terms of a micro-batch, given those of its slots and the logits (B, N, K) of their confidence."""
    weights = slot_weights(blocks.supervised, gamma)
    accept = blocks.supervised * (1 - terms.distance.detach() / 2).clamp(0, 1)
    confidence_error: Tensor | None = None
    if confidence is not None:
        errors = F.binary_cross_entropy_with_logits(confidence.float(), accept, reduction="none")
        confidence_error = (weights * errors).sum()
    return LossSums(
        cross_entropy=(weights * terms.cross_entropy).sum(),
        distance=(weights * terms.distance).sum(),
        confidence=confidence_error,
        weight=weights.sum(),
        accept=accept,
        slot_weights=weights,
    )
