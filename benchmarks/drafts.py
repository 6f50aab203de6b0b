"""What a draft learns from a store: validation tau of trained drafts beside an untrained one and a bigram.

``python -m benchmarks.drafts STORE --seeds 1 2 3 -- --mask-token-id 16 --max-steps 300`` trains a draft for each seed
with the flags of `dspark_store.train` behind ``--``, and judges all three on the same validation samples and anchors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.flags import parsed
from dspark_store.cli.train import parse_arguments
from dspark_store.draft.anchors import draw_blocks, sample_keys
from dspark_store.draft.loss import DraftCounts, SlotTerms, compared, draft_counts, loss_sums
from dspark_store.format.schema import IDS, LAST, MASK
from dspark_store.training.checkpoint import found_checkpoint
from dspark_store.training.journal import read_metrics
from dspark_store.training.loop import Training, held
from dspark_store.training.ranks import joined_ranks

ADDED = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
"""What is added to every count of the bigram; the best of them on the validation samples is taken, in its favour."""


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Tau of one seed: tokens that a step of the target is expected to give, its own included."""

    seed: int
    steps: int
    untrained: float
    bigram: float
    added: float
    trained: float
    waited_share: float


@dataclass(frozen=True, slots=True)
class Bigram:
    """A bigram with a count added to every pair, which a draft must beat to have learned from the states.

    Counted pairs of neighbouring tokens: the followers of token t are ``starts[t]`` to ``starts[t + 1]``.

    ``followers`` and ``counts`` (pairs,) are ordered by their first token, ``starts`` is (V + 1,).
    """

    vocab_size: int
    starts: np.ndarray
    followers: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[np.ndarray], vocab_size: int) -> Bigram:
        """Count the pairs of some texts, each (length,) ids below ``vocab_size``."""
        pairs = [row[:-1].astype(np.int64) * vocab_size + row[1:] for row in rows]
        codes, counts = np.unique(np.concatenate([np.empty(0, np.int64), *pairs]), return_counts=True)
        starts = np.searchsorted(codes, np.arange(vocab_size + 1) * vocab_size)
        return cls(vocab_size, starts, codes % vocab_size, counts)

    def log_probabilities(self, previous: np.ndarray, added: float) -> np.ndarray:
        """Return (n, V) float32: how likely each token is after each of ``previous`` (n,)."""
        rows = np.full((len(previous), self.vocab_size), added, np.float32)
        for row, token in zip(rows, previous.tolist(), strict=True):
            begin, end = self.starts[token], self.starts[token + 1]
            row[self.followers[begin:end]] += self.counts[begin:end]
        logarithms: np.ndarray = np.log(rows / rows.sum(axis=1, keepdims=True))
        return logarithms


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, judge and print; return 0."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    given = parsed("drafts", words[:cut])
    results = [measure(given.store, Path(given.out) / f"seed-{seed}", seed, words[cut + 1 :]) for seed in given.seeds]
    print("seed   steps  untrained   bigram  trained  over untrained  over bigram  waited")
    for result in results:
        over = f"{result.trained - result.untrained:>15.3f}  {result.trained - result.bigram:>11.3f}"
        taus = f"{result.untrained:>9.3f}  {result.bigram:>7.3f}  {result.trained:>7.3f}"
        print(f"{result.seed:>4}  {result.steps:>6}  {taus} {over}  {result.waited_share:>6.1%}")
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def measure(store: str, output: Path, seed: int, flags: Sequence[str]) -> DraftResult:
    """Train one draft; return what it, its beginning and the best bigram are worth on the validation samples."""
    own = ["--store", store, "--output-dir", str(output), "--seed", str(seed)]
    defaults = ["--validation-fraction", "0.1", "--validate-every", "100"]
    config = parse_arguments([*defaults, *flags, *own])
    config.check()
    if config.validate_every == 0:
        raise ValueError("the untrained draft is not judged: give --validate-every a number of steps")
    with joined_ranks(config.resolved_device) as ranks, held(output, ranks) as hold:
        training = Training(config, ranks, found_checkpoint(config, ranks), hold)
        added, bigram = best_bigram(training)
        training.run()
    taus = [line.figures["tau"] for line in read_metrics(output) if line.kind == "validation"]
    return DraftResult(seed, training.total, taus[0], bigram, added, taus[-1], training.waiting_share)


def best_bigram(training: Training) -> tuple[float, float]:
    """Return the best count to add, and tau of the bigram of the training samples with it."""
    loader, cache = training.data.train, training.data.cache
    samples = [int(sample) for sample in loader.samples]
    rows = [cache.read([sample], columns=(IDS,))[IDS][0, : cache.lengths[sample]].numpy() for sample in samples]
    bigram = Bigram.of(rows, training.learner.draft.settings.vocab_size)
    return max(((added, tau_of_bigram(training, bigram, added)) for added in ADDED), key=lambda pair: pair[1])


def tau_of_bigram(training: Training, bigram: Bigram, added: float) -> float:
    """Return what a bigram is worth on the validation samples and anchors of a training."""
    config, draft, counts = training.config, training.learner.draft, None
    if training.data.validation is None:
        raise ValueError("there are no validation samples")
    for batch in training.data.validation:
        ids, device = batch[IDS], batch[IDS].device
        keys = sample_keys(batch["sample"], ids.shape[1], seed=config.seed, epoch=0)
        blocks = draw_blocks(ids, batch[MASK], keys, num_anchors=config.num_anchors, block_size=config.block_size)
        previous = blocks.previous.cpu().numpy()
        logits = torch.from_numpy(bigram.log_probabilities(previous.ravel(), added)).view(*previous.shape, -1)
        with torch.no_grad():
            teacher = draft.head_logits(draft.teacher_states(batch[LAST].to(config.compute_dtype), blocks))
            counts_at, logits = blocks.supervised, logits.to(device)
            each = compared(logits[counts_at], teacher[counts_at], blocks.labels[counts_at])
            terms = SlotTerms.of(each, blocks)
            found: DraftCounts = draft_counts(None, loss_sums(terms, None, blocks), blocks)
        counts = found if counts is None else counts + found
    training.data.validation.set_epoch(0)
    if counts is None:
        raise ValueError("there are no validation samples")
    return counts.rates()["tau"]


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main())
