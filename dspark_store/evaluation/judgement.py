"""What a draft is worth on some prompts: tokens per step, and whether the text is the target's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dspark_store.draft.model import Draft
from dspark_store.evaluation.decoder import Decoder, Greedy, Speculated
from dspark_store.evaluation.sampling import Sampler
from dspark_store.format.schema import IDS, MASK
from dspark_store.readers.cache import Cache

NEAR = {torch.float32: 1e-4, torch.float16: 0.125, torch.bfloat16: 1.0}
"""Logits closer than this may change places with the number of tokens that a forward runs over, by what it runs in.

In half precision that is 128 roundings of a logit between one and two, or eight of one between 16 and 32.
"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Sums over prompts. ``near_ties`` and ``differing`` count those whose text left the target's own.

    A near tie left it where the target's two best logits were closer than `NEAR` says, any other where they were not.
    """

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    near_ties: int = 0
    differing: int = 0

    @classmethod
    def of(cls, speculated: Speculated) -> Judgement:
        """Count one prompt's tokens and steps."""
        return cls(prompts=1, tokens=max(0, len(speculated.tokens) - 1), steps=speculated.steps)

    def __add__(self, other: Judgement) -> Judgement:
        return Judgement(
            self.prompts + other.prompts,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.near_ties + other.near_ties,
            self.differing + other.differing,
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step of the target gave, its own included; 1 is what it gives without a draft."""
        return self.tokens / self.steps if self.steps else 0.0


def judge(
    decoder: Decoder, draft: Draft, prompts: Iterable[Sequence[int]], limit: int, stop: frozenset[int]
) -> Iterator[Judgement]:
    """Yield each prompt's judgement, of up to ``limit`` tokens after it, chosen greedily."""
    near = NEAR[decoder.dtype]
    for prompt in prompts:
        own, speculated = decoder.greedy(prompt, limit, stop), decoder.speculate(draft, prompt, limit, stop)
        yield compare(own, speculated, near)


def judge_sampled(
    decoder: Decoder,
    draft: Draft,
    prompts: Iterable[Sequence[int]],
    limit: int,
    stop: frozenset[int],
    temperature: float,
    seed: int,
) -> Iterator[Judgement]:
    """Yield each prompt's judgement where tokens are drawn at a temperature: there is no text to compare with."""
    for number, prompt in enumerate(prompts):
        yield Judgement.of(decoder.speculate(draft, prompt, limit, stop, Sampler(temperature, seed + number)))


def compare(own: Greedy, speculated: Speculated, near_tie: float = NEAR[torch.float32]) -> Judgement:
    """Compare one prompt's speculated text with the target's own, up to the first difference.

    Best logits that are closer than ``near_tie`` are a near tie.
    """
    pairs = zip(own.tokens, speculated.tokens, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None and len(own.tokens) != len(speculated.tokens):
        place = min(len(own.tokens), len(speculated.tokens)) - 1
    near = place is not None and own.margins[place] < near_tie
    return replace(Judgement.of(speculated), near_ties=int(near), differing=int(place is not None and not near))


def prompts_of(cache: Cache, samples: Sequence[int]) -> Iterator[list[int]]:
    """Yield, for each sample, its tokens up to the first supervised one; none for a sample that begins with it."""
    for sample in samples:
        batch = cache.read([sample], columns=(IDS, MASK))
        supervised = np.flatnonzero(batch[MASK][0].numpy())
        prompt = batch[IDS][0][: int(supervised[0])].tolist() if supervised.size else []
        if prompt:
            yield prompt
