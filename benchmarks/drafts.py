"""What a draft learns from a store: validation tau of trained drafts beside an untrained one and a bigram.

``python -m benchmarks.drafts STORE --seeds 1 2 3 -- --mask-token-id 16 --max-steps 300`` trains a draft for each seed
with the flags of `dspark_store.train` behind ``--``, and judges all three on the same validation samples and anchors.

With several stores, ``EXACT LOSSY ...``, drafts are paired: of one seed all begin alike and see the same batches, and
only the states, the teacher's among them, are other ones. All are judged on the exact states. Seeds are taken in turn,
at least three, until each store's interval is narrow enough. What is there already is not trained again.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.flags import parsed
from benchmarks.tables import Cell, Column, Recorder, Table
from dspark_store.cli.train import parse_arguments
from dspark_store.draft.anchors import draw_blocks, sample_keys
from dspark_store.draft.loss import DraftCounts, SlotTerms, compared, draft_counts, loss_sums
from dspark_store.draft.model import head_logits
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.sizes import distinct_states, of_ragged_rows, ragged_rows_name
from dspark_store.inspection import copy_shards
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from dspark_store.precompute.report import stored_bytes
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.index import TargetWeights
from dspark_store.training.checkpoint import found_checkpoint
from dspark_store.training.data import open_data
from dspark_store.training.journal import read_metrics
from dspark_store.training.learner import Learner, nothing_judged
from dspark_store.training.loop import Training, held
from dspark_store.training.ranks import joined_ranks

ADDED = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
"""What is added to every count of the bigram; the best of them on the validation samples is taken, in its favour."""

LEAST_SEEDS, JUDGED_ANCHORS = 3, 16
ERROR_SAMPLES, KL_STRIDE = 40, 8
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""Student's t at 0.975, for two seeds to eight."""


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
    given, flags = parsed("drafts", words[:cut]), words[cut + 1 :]
    if given.fp8 is not None:
        write_fp8(Path(given.stores[0]), given.fp8)
        given.stores.append(str(given.fp8))
    if len(given.stores) > 1:
        return compare_stores(given, Recorder("drafts", [Path(word).name for word in words]), flags)
    (store,) = given.stores
    results = [measure(store, Path(given.out) / f"seed-{seed}", seed, flags) for seed in given.seeds]
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


def write_fp8(source: Path, place: Path) -> None:
    """Copy a store with its states as float8_e4m3fn would have them, by a scale per token and layer, kept as bf16."""

    def rounded(states: Tensor, _: int | None) -> Tensor:
        scale = (states.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
        return ((states / scale).to(torch.float8_e4m3fn).float() * scale).to(states.dtype)

    with patch.object(copy_shards, "rounded_states", rounded):
        rechunk(source, place, CopySettings())


def fp8_bytes(cache: Cache) -> int:
    """Return the bytes of a store's samples in FP8, not compressed: a byte per value, a scale of 4 per vector."""
    vectors = distinct_states(cache.schema, cache.record.last_layer)
    return int(cache.lengths.sum()) * (vectors * (cache.schema.hidden_size + 4) + 5)


def compare_stores(given: Namespace, recorder: Recorder, flags: Sequence[str]) -> int:
    """Train paired drafts from the exact store and the others, and print what their states cost; return 0."""
    exact, *others = [Path(store) for store in given.stores]
    taus: dict[str, list[float]] = {store.name: [] for store in (exact, *others)}
    accepted: dict[str, list[list[float]]] = {name: [] for name in taus}
    for number, seed in enumerate(given.seeds, 1):
        for store in (exact, *others):
            figures = judged(store, exact, Path(given.out) / store.name / f"seed-{seed}", seed, flags)
            taus[store.name].append(figures["tau"])
            accepted[store.name].append([value for name, value in figures.items() if name.startswith("accept@")])
            print(f"seed {seed}, {store.name}: tau {figures['tau']:.4f}", flush=True)
        if number >= LEAST_SEEDS and all(width_of(taus, store.name, exact.name) <= given.until for store in others):
            break
    caches = {store.name: open_cache(store) for store in (exact, *others)}
    recorder.describe(f"{len(taus[exact.name])} seeds, {len(caches[exact.name])} samples, `{shlex.join(flags)}`")
    sizes = {name: stored_bytes(cache) for name, cache in caches.items()}
    if given.fp8 is not None:
        sizes[given.fp8.name] = fp8_bytes(caches[exact.name])
    recorder.add(_cost_table(caches, sizes, taus, exact.name))
    places = (Column(f"place {place}", ".3f") for place in range(len(accepted[exact.name][0])))
    rows = tuple((name, *np.mean(values, axis=0).tolist()) for name, values in accepted.items())
    recorder.add(Table("Acceptance by place, mean of the seeds", (Column("store"), *places), rows))
    errors = {name: relative_errors(caches[exact.name], cache) for name, cache in caches.items() if name != exact.name}
    layers = (Column(str(layer), ".4f") for layer in (*caches[exact.name].layer_ids, "last"))
    recorder.add(
        Table("Relative error, mean of tokens", (Column("store"), *layers), tuple((n, *e) for n, e in errors.items()))
    )
    recorder.save(given.json)
    return 0


def judged(store: Path, exact: Path, output: Path, seed: int, flags: Sequence[str]) -> dict[str, float]:
    """Train a draft from a store; return its figures on the exact states of the validation samples."""
    kept = output / "judged.json"
    if not kept.exists():
        own = ["--output-dir", str(output), "--seed", str(seed), "--resume"]
        config = parse_arguments(["--validation-fraction", "0.1", *flags, *own, "--store", str(store)])
        config.check()
        with joined_ranks(config.resolved_device) as ranks, held(output, ranks) as hold:
            training = Training(config, ranks, found_checkpoint(config, ranks), hold)
            training.run()
            judge = replace(config, store=str(exact), num_anchors=JUDGED_ANCHORS)
            learner = Learner(training.learner.draft, judge, training.learner.schedule, ranks)
            found, validation = nothing_judged(judge, ranks.device), open_data(judge, ranks).validation
            if validation is None:
                raise ValueError("there are no validation samples: give --validation-fraction")
            for batch in validation:
                found = found + learner.validate(batch)
            kept.write_text(json.dumps(found.figures(ranks), indent=2) + "\n")
    figures: dict[str, float] = json.loads(kept.read_text())
    return figures


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of some differences and its 95 % interval, by Student's t; a single one has no bounds."""
    mean, count = float(np.mean(differences)), len(differences)
    if count < 2:
        return mean, -math.inf, math.inf
    reach = QUANTILES[min(count, len(QUANTILES) + 1) - 2] * float(np.std(differences, ddof=1)) / math.sqrt(count)
    return mean, mean - reach, mean + reach


def _differences(taus: Mapping[str, Sequence[float]], name: str, exact: str) -> list[float]:
    return [tau / base - 1 for tau, base in zip(taus[name], taus[exact], strict=True)]


def width_of(taus: Mapping[str, Sequence[float]], name: str, exact: str) -> float:
    """Return the width of the interval of a store's relative differences in tau."""
    _, low, high = interval(_differences(taus, name, exact))
    return high - low


def _cost_table(
    caches: Mapping[str, Cache], sizes: Mapping[str, int], taus: Mapping[str, Sequence[float]], exact: str
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, cache in caches.items():
        tokens, stored = int(cache.lengths.sum()), sizes[name]
        mean, low, high = interval(_differences(taus, name, exact))
        kl = None if name == exact else divergence(caches[exact], cache)
        differences = (None,) * 3 if name == exact else (100 * mean, 100 * low, 100 * high)
        share = of_ragged_rows(cache.schema, tokens, stored)
        rows.append((name, stored / tokens, share, kl, float(np.mean(taus[name])), *differences))
    vectors = ragged_rows_name(caches[exact].schema.num_layers + 1)
    facts = (Column("store"), Column("bytes per token", ",.0f"), Column(f"of {vectors}", ".3f"))
    taus_of = (Column("KL of the target's logits", ".4f"), Column("tau", ".4f"))
    columns = (*facts, *taus_of, *(Column(name, "+.2f") for name in ("difference, %", "95 % from", "to")))
    return Table("Bytes per token against tau", columns, tuple(rows))


def _states(cache: Cache, sample: int) -> Tensor:
    """Return the states of a sample, (K + 1, length, H) fp32: of each captured layer, then the last."""
    valid = slice(0, int(cache.lengths[sample]))
    batch = cache.read([sample], columns=(LAYERS, LAST), positions=valid, layout="stacked")
    return torch.cat([batch[LAYERS][0], batch[LAST]]).float()


def relative_errors(exact: Cache, cache: Cache) -> list[float]:
    """Return |x - y| / |x| of each captured layer and of the last states, in the mean of the tokens of some samples."""
    found = []
    for sample in range(0, len(exact), max(1, len(exact) // ERROR_SAMPLES)):
        states = _states(exact, sample)
        found.append((_states(cache, sample) - states).norm(dim=-1) / states.norm(dim=-1))
    return torch.cat(found, dim=1).mean(1).tolist()


def divergence(exact: Cache, cache: Cache) -> float:
    """Return the mean KL divergence of the target's distributions by a store's last states from those by the exact."""
    tables = exact.weights()
    divergences = []
    for sample in range(0, len(exact), max(1, len(exact) // ERROR_SAMPLES)):
        own, other = (
            _logits(_states(each, sample)[-1][::KL_STRIDE], exact, tables).log_softmax(-1) for each in (exact, cache)
        )
        divergences.append((own.exp() * (own - other)).sum(-1))
    return float(torch.cat(divergences).mean())


def _logits(last: Tensor, cache: Cache, tables: TargetWeights) -> Tensor:
    bias = None if tables.bias is None else tables.bias.float()
    scale, cap = (cast("float | None", cache.head.get(name)) for name in ("logit_scale", "final_logit_softcapping"))
    return head_logits(last, tables.head.float(), bias, scale, cap)


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
