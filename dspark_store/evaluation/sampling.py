"""Speculative sampling: which proposed tokens are kept, so that the text is drawn as the target alone would draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """K tokens that a draft drew, and the probabilities (K, V) that it drew them with."""

    tokens: list[int]
    probabilities: Tensor


class Sampler:
    """Draws tokens at a temperature, seeded; at temperature 0 the likeliest.

    ValueError for a temperature or a seed that cannot be.
    """

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature is {temperature}, expected a finite number, 0 or more")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}, expected 0 to 2**64 - 1")
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return what logits (..., V) are drawn with, fp32 (..., V): all of it on the likeliest at temperature 0."""
        if self.temperature == 0:
            likeliest = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, likeliest, 1.0)
        behind = logits.float() - logits.float().amax(-1, keepdim=True)  # however small the temperature, 0 stays 0
        return (behind / max(self.temperature, torch.finfo(torch.float32).tiny)).softmax(-1)

    def draw(self, probabilities: Tensor) -> int:
        """Draw a token from (V,)."""
        if self.temperature == 0:  # one token has it all, and greedy decoding asks for it K + 1 times a step
            return int(probabilities.argmax())
        return int(torch.multinomial(probabilities.cpu(), 1, generator=self._generator))

    def judge(self, proposal: Proposal, target: Tensor) -> list[int]:
        """Return the proposed tokens that are kept, and one of the target's own after them.

        ``target`` (K + 1, V) is what the target draws with in each place. A token is kept with the probability that
        the target's share of it bears to the draft's, at most 1; where one is not, the target's own is drawn from
        what it gives more than the draft. Each token is then one that the target would draw, with its probability.
        """
        kept: list[int] = []
        for token, drafted, own in zip(proposal.tokens, proposal.probabilities, target, strict=False):
            if float(torch.rand((), generator=self._generator)) * float(drafted[token]) >= float(own[token]):
                return [*kept, self.draw(residual(own, drafted))]
            kept.append(token)
        return [*kept, self.draw(target[len(kept)])]


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return (V,) what the target gives more than the draft, as probabilities; the target's where that is nothing."""
    more = (target - draft).clamp(min=0)
    total = more.sum()
    return more / total if total > 0 else target
