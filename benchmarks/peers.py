"""The same samples as other projects keep them, and batches of them read as those projects read.

They follow the public descriptions of the peers' layouts and access patterns, not their code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.costs import spread
from benchmarks.samples import Samples
from benchmarks.tables import Column, PeerComparison, Table
from dspark_store import CACHE_KEYS, Cache, open_cache

type Batch = dict[str, Any]

IDS, MASK, LAYERS, LAST = CACHE_KEYS
_ALIGNMENT = 8
PIPELINES = {
    "zarr-python, default pipeline": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarr-python, fused pipeline": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarr-python, zarrs pipeline": "zarrs.ZarrsCodecPipeline",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to keep and read samples.

    ``batch`` returns the four keys of some samples, each with a first axis of the batch; ``stored_bytes`` what is read
    for samples; ``close`` lets go of files.
    """

    name: str
    files: Path
    batch: Callable[[Sequence[int]], Batch]
    stored_bytes: Callable[[Sequence[int]], int]
    close: Callable[[], None]


def _mean_bytes(cache: Cache, files: Path) -> Callable[[Sequence[int]], int]:
    """Return what reading some samples takes: the mean over the store, since samples compress alike.

    An object of two names counts twice, since a reader of arrays asks for both.
    """
    total = sum(path.stat().st_size for path in files.glob("*/c.*"))
    return lambda samples: round(total * len(samples) / len(cache))


def safetensors_shards(cache: Cache, place: Path) -> Contender:
    """Return NeMo Automodel's cache: padded safetensors shards; a slice per key and sample, then a stack."""
    schema, handles = cache.schema, dict[int, Any]()
    sample_bytes = schema.seq_length * (_vector_bytes(cache) + 16)
    if not place.exists():
        place.mkdir(parents=True)
        for shard in range(schema.tokens.num_shards):
            save_file(cache.read(list(schema.tokens.rows(shard))), place / f"shard-{shard:06d}.safetensors")

    def item(sample: int) -> Batch:
        shard, row = schema.tokens.locate(sample)
        if shard not in handles:
            opened: Any = safe_open(place / f"shard-{shard:06d}.safetensors", framework="pt")  # it is not annotated
            handles[shard] = opened.__enter__()
        return {key: handles[shard].get_slice(key)[row] for key in CACHE_KEYS}

    def batch(samples: Sequence[int]) -> Batch:
        items = [item(sample) for sample in samples]
        return {key: torch.stack([item[key] for item in items]) for key in CACHE_KEYS}

    name = "safetensors, slice and stack (NeMo)"
    return Contender(name, place, batch, lambda samples: len(samples) * sample_bytes, handles.clear)


def mapped_ragged(cache: Cache, place: Path) -> Contender:
    """Return DeepSpec's cache: raw ragged samples in one mapped file; a copy per sample, padded to the longest."""
    lengths, dtype = cache.lengths.astype(np.int64), cache.dtype
    state = cache.schema.hidden_size * dtype.itemsize
    sizes = -(-lengths * (_vector_bytes(cache) + 5) // _ALIGNMENT) * _ALIGNMENT
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    mapped: list[np.ndarray] = []
    if not place.exists():
        place.mkdir(parents=True)
        with (place / "samples.bin").open("wb") as file:
            for sample, length in enumerate(lengths.tolist()):
                file.seek(int(offsets[sample]))
                row = cache.read([sample], positions=slice(0, length))
                row |= {IDS: row[IDS].int(), MASK: row[MASK].byte()}
                for key in (IDS, LAYERS, LAST, MASK):
                    file.write(row[key][0].contiguous().view(torch.uint8).numpy().tobytes())
            file.truncate(int(offsets[-1]))

    def item(sample: int) -> Batch:
        length = int(lengths[sample])
        raw = torch.from_numpy(np.array(mapped[0][offsets[sample] : offsets[sample + 1]]))
        cuts = np.cumsum([4 * length, cache.schema.num_layers * state * length, state * length, length]).tolist()
        ids, layers, last, mask = (raw[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False))
        states = {LAYERS: layers.view(dtype).view(length, -1), LAST: last.view(dtype).view(length, -1)}
        return {IDS: ids.view(torch.int32).long(), MASK: mask.long(), **states}

    def batch(samples: Sequence[int]) -> Batch:
        if not mapped:
            mapped.append(np.memmap(place / "samples.bin", np.uint8, "r"))
        items = [item(sample) for sample in samples]
        longest = max(len(item[IDS]) for item in items)
        return {key: torch.stack([_pad(item[key], longest) for item in items]) for key in CACHE_KEYS}

    name = "mmap of ragged rows, copy and pad (DeepSpec)"
    return Contender(name, place, batch, lambda samples: int(sizes[list(samples)].sum()), mapped.clear)


def _vector_bytes(cache: Cache) -> int:
    """Return the bytes of a position's K + 1 vectors."""
    return (cache.schema.num_layers + 1) * cache.schema.hidden_size * cache.schema.dtype.itemsize


def _pad(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, 0) * (values.ndim - 1) + (0, length - len(values)))


def _other_reader(
    name: str, store: Path, opened: Callable[[Path], Any], read: Callable[[Any, Sequence[int]], Any]
) -> Contender:
    """Return our store through another implementation, whose arrays are opened when they are first read."""
    arrays: dict[str, Any] = {}

    def batch(samples: Sequence[int]) -> Batch:
        if not arrays:
            arrays.update({key: opened(store / key) for key in CACHE_KEYS})
        return {key: read(array, samples) for key, array in arrays.items()}

    return Contender(name, store, batch, _mean_bytes(open_cache(store), store), arrays.clear)


def zarr_python(name: str, store: Path) -> Contender:
    """Return our store through zarr-python, with the codec pipeline of this name."""
    reader = _other_reader(
        name,
        store,
        lambda path: zarr.open_array(path, mode="r"),
        lambda array, samples: array.oindex[sorted(samples)],
    )

    def batch(samples: Sequence[int]) -> Batch:
        with zarr.config.set({"codec_pipeline.path": PIPELINES[name]}):
            return reader.batch(samples)

    return replace(reader, batch=batch)


def tensorstore_reader(store: Path) -> Contender:
    """Return our store through TensorStore."""
    import tensorstore

    def opened(path: Path) -> Any:  # noqa: ANN401 - it is not annotated
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
        return tensorstore.open(spec, read=True).result()

    def read(array: Any, samples: Sequence[int]) -> np.ndarray:  # noqa: ANN401 - as above
        return np.stack([future.result() for future in [array[sample].read() for sample in samples]])

    return _other_reader("TensorStore", store, opened, read)


READERS: tuple[Callable[[Path], Contender], ...] = (
    partial(zarr_python, "zarr-python, default pipeline"),
    partial(zarr_python, "zarr-python, fused pipeline"),
    tensorstore_reader,
)
"""The other readers of a store of ours."""


def rate_table(
    title: str,
    rates: Mapping[str, Sequence[float]],
    stored: Mapping[str, float],
    samples: Samples,
    base: str,
    notes: Sequence[str] = (),
) -> Table:
    """Return a table of samples per second and stored bytes per sample, by contender, with ratios to the ``base``."""
    columns = (
        Column("contender"),
        Column("samples/s", ",.1f"),
        Column("lower quartile", ",.1f"),
        Column("upper quartile", ",.1f"),
        Column("GB/s of states"),
        Column("KB stored per sample", ",.0f"),
        Column("ratio"),
    )
    found = {name: spread(values) for name, values in rates.items()}
    rows = tuple(
        (
            name,
            one.median,
            one.low,
            one.high,
            one.median * samples.mean_bytes / 1e9,
            stored[name] / 1e3,
            one.median / found[base].median,
        )
        for name, one in found.items()
    )
    mine = [name for name in found if name.startswith("ours")]
    comparisons = tuple(
        PeerComparison(title, name, peer, found[name].median / found[peer].median)
        for peer in found
        if peer not in mine
        for name in mine
    )
    return Table(title, columns, rows, tuple(notes), comparisons)
