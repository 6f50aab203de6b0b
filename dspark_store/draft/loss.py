"""The loss (cross-entropy to the labels, distance to the teacher, the confidence's own error), and a draft's counts.

Logits are made of a piece of the slots at a time, so that no vocabulary is held for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark_store.draft.anchors import Blocks
from dspark_store.draft.model import Draft, DraftOutput

PIECE_TOKENS = 128


def by_pieces(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """Return ``function`` (m, n) of each n = ``size`` rows of all tensors (T, ...), side by side: (m, T).

    What it makes on its way is made anew in the backward pass.
    """
    pieces = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    with _weights_cast_anew():
        parts = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(parts, dim=1)


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Have autocast keep no copies of weights: the pieces' gradients would be summed in the dtype of the copy."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


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


_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class LossWeights:
    """What each term counts."""

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in asdict(self).items():
            if weight < 0:
                raise ValueError(f"the weight of {name} must be >= 0, got {weight}")


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
