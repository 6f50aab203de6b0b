"""Running the target again on stored samples, in the batches that they were captured in, and comparing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from dspark_store.format.schema import LAST, LAYERS
from dspark_store.precompute.batches import batches_of
from dspark_store.precompute.capture import CaptureSettings, padded_batch
from dspark_store.readers.cache import Cache
from dspark_store.target.capture import TargetCapture
from dspark_store.writers.tokens import read_token_shard


def recompute(
    cache: Cache, capture: TargetCapture, settings: CaptureSettings, samples: Sequence[int]
) -> Iterator[tuple[int, float]]:
    """Yield, for each sample, its index and the largest difference between stored and recomputed states.

    0.0 means equal bit by bit. ``settings`` must be the capture's own: the batch size decides which samples shared a
    forward, and with it the bits.
    """
    grid = cache.schema.tokens
    for shard, members in groupby(sorted(samples), lambda sample: grid.locate(sample)[0]):
        rows = read_token_shard(cache.storage, cache.record, shard)
        wanted = {grid.locate(sample)[1]: sample for sample in members}
        for batch in batches_of(rows.lengths, settings.batch_size):
            if not wanted.keys() & set(batch):
                continue
            ids, attention = padded_batch(rows, batch, settings.pad_token_id)
            states = capture(ids.to(settings.device), attention.to(settings.device))
            for position, row in enumerate(batch):
                if row in wanted:
                    length = rows.lengths[row]
                    fresh = [*states.layers, states.last]
                    yield wanted[row], _difference(cache, wanted[row], [layer[position, :length] for layer in fresh])


def _difference(cache: Cache, sample: int, fresh: Sequence[torch.Tensor]) -> float:
    batch = cache.read([sample], columns=(LAYERS, LAST), positions=slice(0, len(fresh[0])), layout="stacked")
    stored = [*batch[LAYERS][0], batch[LAST][0]]
    differences = [
        0.0
        if torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        else float((old.double() - new.double()).abs().max())
        for old, new in ((old, new.to(cache.dtype).cpu().contiguous()) for old, new in zip(stored, fresh, strict=True))
    ]
    return max(differences)
