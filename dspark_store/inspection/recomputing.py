"""Random samples of a store beside fresh forwards of its target."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dspark_store.format.damage import DamagedStoreError, Part, Problem
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.schema import LAST
from dspark_store.precompute.recompute import recompute
from dspark_store.progress import start_progress
from dspark_store.readers.cache import Cache
from dspark_store.target.batches import BatchLimit, recorded_limit
from dspark_store.target.capture import TargetCapture
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource

_NEEDED = ("target_weights", "batch_size", "compute_dtype", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The largest difference of a sample's stored states from fresh ones: 0.0 when they are equal bit by bit."""

    sample: int
    difference: float

    def to_json(self) -> dict[str, JsonValue]:
        """Return this as a JSON value; null for a difference that is no number."""
        return {"sample": self.sample, "difference": self.difference if math.isfinite(self.difference) else None}


def recompute_samples(
    cache: Cache, source: TargetSource, device: torch.device, samples: Sequence[int], tolerance: float
) -> tuple[list[Recomputed], list[Problem]]:
    """Run a store's target on samples in the batches that they were captured in; return the difference of each.

    A sample is a problem that differs by more than ``tolerance``, or by what is no number, or that cannot be read.
    ValueError when the store does not say how it was captured, or the target has other weights.
    """
    fresh, problems = list[Recomputed](), list[Problem]()
    with start_progress("recompute", len(samples), "samples") as progress:
        capture, limit = _load_target(cache, source, device)
        for sample in samples:
            wrong = ""
            try:
                ((_, difference),) = recompute(cache, capture, device, limit, [sample])
                fresh.append(Recomputed(sample, difference))
                if not difference <= tolerance:
                    wrong = f"differs from a fresh forward of the target by up to {difference:.3g}"
            except (DamagedStoreError, OSError) as error:
                wrong = f"cannot be recomputed: {error}"
            if wrong:
                shard = cache.schema.tokens.locate(sample)[0]
                problems.append(Problem(Part.STATES, LAST, shard, (sample,), f"sample {sample} {wrong}"))
            progress.advance(1)
    return fresh, problems


def _load_target(cache: Cache, source: TargetSource, device: torch.device) -> tuple[TargetCapture, BatchLimit]:
    """Load the target of a store, with the dtype, the attention and the batches of its capture."""
    manifest = cache.manifest
    limit = recorded_limit(manifest)
    missing = [name for name in _NEEDED if (limit if name == "batch_size" else manifest.get(name)) is None]
    if missing or limit is None:
        raise ValueError(
            f"the manifest of {cache.storage} lacks {', '.join(missing)}: its states cannot be recomputed, since no "
            "precompute wrote it"
        )
    weights = target_fingerprint(source)["weights"]
    if weights != manifest["target_weights"]:
        raise ValueError(
            f"target {source.model} has other weights ({weights[:12]}) than the store was made with "
            f"({str(manifest['target_weights'])[:12]}): give the one that it was made with, {manifest['target_model']}"
        )
    attention = manifest.get("attn_implementation")
    # of a target that was cut, the first layers
    depth = None if manifest.get("target_num_hidden_layers_full") is None else manifest["num_hidden_layers"]
    if depth is not None and not isinstance(depth, int):
        raise ValueError(f"the manifest's num_hidden_layers is {depth!r}, expected a number")
    model = load_target(
        source,
        dtype=getattr(torch, str(manifest["compute_dtype"])),
        device=device,
        attn_implementation=None if attention is None else str(attention),
        num_layers=depth,
    )
    return TargetCapture(model, cache.layer_ids), limit


def draw_samples(cache: Cache, count: int, seed: int, without: Collection[int]) -> list[int]:
    """Return ``count`` random samples of the committed shards, ascending, or all where there are no more."""
    shards = cache.index.committed()
    pool = [sample for shard in shards for sample in cache.schema.tokens.rows(shard) if sample not in without]
    return sorted(random.Random(seed).sample(pool, min(count, len(pool))))
