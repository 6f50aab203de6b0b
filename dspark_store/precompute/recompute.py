"""Running the target again on stored samples, in the batches that they were captured in, and comparing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import cast

import numpy as np
import torch

from dspark_store.format.dtypes import rounded_states
from dspark_store.format.int8 import LayerScale, dequantise, quantise, split_codes
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.token_shards import TokenRows
from dspark_store.readers.cache import Cache
from dspark_store.target.batches import BatchLimit, batches_of, padded_batch
from dspark_store.target.capture import CapturedStates, TargetCapture


def captured_again(
    cache: Cache, capture: TargetCapture, device: torch.device, limit: BatchLimit, samples: Iterable[int]
) -> Iterator[tuple[range, list[int], CapturedStates]]:
    """Yield each capture batch that has one of the samples: its shard's samples, its rows among them, their states.

    ``limit`` must be the capture's own: what bounds a batch decides which samples shared a forward, and with it the
    bits. So does the size of the shards that were captured, which a copy remembers.
    """
    size, vocab_size = cache.record.capture_shard_size, cast(int, cache.manifest["target_vocab_size"])
    for shard, members in groupby(sorted(set(samples)), lambda sample: sample // size):
        captured = range(shard * size, min((shard + 1) * size, len(cache)))
        wanted = {sample - captured.start for sample in members}
        for batch in batches_of(cache.lengths[captured.start : captured.stop].tolist(), limit):
            if wanted & set(batch):
                rows = _tokens(cache, [captured[row] for row in batch])
                ids, attention = padded_batch(rows, range(len(batch)), cache.pad_token_id, vocab_size)
                yield captured, batch, capture(ids.to(device), attention.to(device))


def recompute(
    cache: Cache, capture: TargetCapture, device: torch.device, limit: BatchLimit, samples: Collection[int]
) -> Iterator[tuple[int, float]]:
    """Yield, for each sample, its index and the largest difference between stored and recomputed states.

    0.0 means equal bit by bit.
    """
    for captured, batch, states in captured_again(cache, capture, device, limit, samples):
        for position, sample in enumerate(captured[row] for row in batch):
            if sample in samples:
                length = int(cache.lengths[sample])
                fresh = [layer[position, :length] for layer in (*states.layers, states.last)]
                yield sample, _difference(cache, sample, fresh)


def _tokens(cache: Cache, samples: Sequence[int]) -> TokenRows:
    batch = cache.read(samples, columns=(IDS, MASK))
    lengths = cache.lengths[list(samples)].tolist()
    ids, masks = (
        [values[:length].numpy().astype(dtype) for values, length in zip(batch[column], lengths, strict=True)]
        for column, dtype in ((IDS, np.int32), (MASK, np.uint8))
    )
    return TokenRows(ids, masks)


def _difference(cache: Cache, sample: int, fresh: Sequence[torch.Tensor]) -> float:
    batch = cache.read(
        [sample], columns=(LAYERS, LAST), positions=slice(0, len(fresh[0])), layout="stacked", dequantise=False
    )
    stored, kept = [*batch[LAYERS][0], batch[LAST][0]], cache.schema.mantissa_bits
    if cache.schema.int8 is not None:
        scales = [cache.schema.scale(item.column, item.slot) for item in cache.schema.state_objects]
        return max(_code_difference(*each) for each in zip(stored, fresh, scales, strict=True))
    cast = (rounded_states(new.to(cache.dtype).cpu().contiguous(), kept) for new in fresh)
    differences = [
        0.0
        if torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        else float((old.double() - new.double()).abs().max())
        for old, new in zip(stored, cast, strict=True)
    ]
    return max(differences)


def _code_difference(stored: torch.Tensor, fresh: torch.Tensor, scale: LayerScale) -> float:
    """Return 0.0 for equal codes, else by how much a value differs beyond one step, and at least the least number."""
    codes, _ = quantise(fresh.cpu(), scale)
    differ = (codes != stored).any(-1)
    if not bool(differ.any()):
        return 0.0
    both = [states[differ] for states in (codes, stored)]
    values = [torch.empty(len(states), fresh.shape[1], dtype=torch.float64) for states in both]
    for states, decoded in zip(both, values, strict=True):
        dequantise(states, scale.high_channels, decoded)
    exponents = torch.maximum(*(split_codes(states, fresh.shape[1])[2] for states in both))
    beyond = (values[0] - values[1]).abs() - torch.exp2(exponents.double())[:, None]
    return max(math.ulp(0.0), float(beyond.nan_to_num(nan=math.inf).max()))
