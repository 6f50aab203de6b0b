"""The same samples as other projects keep them, and batches of them read as those projects read.

Each contender has ``prepare`` (write its files from a store, once) and ``batch`` (the four cache keys, stacked). They
follow the public descriptions of the peers' layouts and access patterns, not their code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import zarr
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.storage import RateLimit
from dspark_store import CACHE_KEYS, Cache
from dspark_store.readers.tensors import Layout

type Batch = dict[str, Any]

IDS, MASK, LAYERS, LAST = CACHE_KEYS
_ALIGNMENT = 8


PIPELINES = {
    "zarr-python, default pipeline": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarr-python, fused pipeline": "zarr.core.codec_pipeline.FusedCodecPipeline",
    "zarr-python, zarrs pipeline": "zarrs.ZarrsCodecPipeline",
}


class Contender(Protocol):
    """One way to keep and read samples."""

    name: str
    files: Path

    def batch(self, samples: Sequence[int]) -> Batch:
        """Return the four keys of some samples, each with a first axis of the batch."""
        ...

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """Return the bytes that some samples take on storage."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class Ours:
    """This project's reader, with ``threads`` threads into one batch's memory that is used again."""

    def __init__(self, name: str, cache: Cache, layout: Layout) -> None:
        self.name = name
        self.files = Path(str(getattr(cache.storage, "root", "")))
        self._cache = cache
        self._layout: Layout = layout
        self._out: dict[str, torch.Tensor] | None = None

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        out = self._out if self._out is not None and len(self._out[IDS]) == len(samples) else None
        self._out = self._cache.read(samples, layout=self._layout, out=out)
        return self._out

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """See `Contender`: the mean over the store, since samples compress alike."""
        schema = self._cache.schema
        total = sum(self._cache.index.shard_bytes(shard) for shard in range(schema.tokens.num_shards))
        return round(total * len(samples) / len(self._cache))

    def close(self) -> None:
        """See `Contender`."""
        self._cache.close()


class SafetensorsShards:
    """NeMo Automodel's cache: padded safetensors shards; a slice a key and sample, then a stack."""

    name = "safetensors, slice and stack (NeMo)"

    def __init__(self, cache: Cache, place: Path) -> None:
        self.files = place
        self._shard_size = cache.schema.shard_size
        self._handles: dict[int, Any] = {}
        schema = cache.schema
        vectors = (schema.num_layers + 1) * schema.hidden_size * schema.dtype.itemsize
        self._sample_bytes = schema.seq_length * (vectors + 16)
        if not place.exists():
            place.mkdir(parents=True)
            for shard in range(schema.tokens.num_shards):
                save_file(cache.read(list(schema.tokens.rows(shard))), place / f"shard-{shard:06d}.safetensors")

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        items = []
        for sample in samples:
            shard, row = divmod(sample, self._shard_size)
            if shard not in self._handles:
                path = self.files / f"shard-{shard:06d}.safetensors"
                self._handles[shard] = safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call] # untyped
            items.append({key: self._handles[shard].get_slice(key)[row] for key in CACHE_KEYS})
        return {key: torch.stack([item[key] for item in items]) for key in CACHE_KEYS}

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """See `Contender`."""
        return len(samples) * self._sample_bytes

    def close(self) -> None:
        """See `Contender`."""
        self._handles.clear()


class MappedRagged:
    """DeepSpec's cache: raw ragged samples in one file, mapped; a copy a sample, padded to the batch's longest."""

    name = "mmap of ragged rows, copy and pad (DeepSpec)"

    def __init__(self, cache: Cache, place: Path) -> None:
        schema = cache.schema
        self.files = place
        self._width = schema.hidden_size
        self._layers = schema.num_layers
        self._dtype = cache.dtype
        self._lengths = cache.lengths.astype(np.int64)
        vectors = (schema.num_layers + 1) * schema.hidden_size * schema.dtype.itemsize
        sizes = -(-self._lengths * (vectors + 5) // _ALIGNMENT) * _ALIGNMENT
        self._offsets = np.concatenate([[0], np.cumsum(sizes)])
        self._map: np.ndarray | None = None
        if not place.exists():
            place.mkdir(parents=True)
            with (place / "samples.bin").open("wb") as file:
                for sample in range(len(cache)):
                    file.seek(int(self._offsets[sample]))
                    item = cache.read([sample], positions=slice(0, int(self._lengths[sample])))
                    for key, dtype in ((IDS, torch.int32), (LAYERS, None), (LAST, None), (MASK, torch.uint8)):
                        values = item[key][0] if dtype is None else item[key][0].to(dtype)
                        file.write(values.contiguous().view(torch.uint8).numpy().tobytes())
                file.truncate(int(self._offsets[-1]))

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        if self._map is None:
            self._map = np.memmap(self.files / "samples.bin", np.uint8, "r")
        items = [self._item(sample) for sample in samples]
        longest = max(len(item[IDS]) for item in items)
        return {key: torch.stack([_pad(item[key], longest) for item in items]) for key in CACHE_KEYS}

    def _item(self, sample: int) -> Batch:
        if self._map is None:
            raise RuntimeError("the file is not mapped")
        length = int(self._lengths[sample])
        raw = torch.from_numpy(np.array(self._map[self._offsets[sample] : self._offsets[sample + 1]]))
        state = length * self._width * self._dtype.itemsize
        cuts = np.cumsum([4 * length, self._layers * state, state, length]).tolist()
        ids, layers, last, mask = (raw[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False))
        return {
            IDS: ids.view(torch.int32).long(),
            MASK: mask.long(),
            LAYERS: layers.view(self._dtype).view(length, -1),
            LAST: last.view(self._dtype).view(length, self._width),
        }

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """See `Contender`."""
        return int((self._offsets[np.array(samples) + 1] - self._offsets[list(samples)]).sum())

    def close(self) -> None:
        """See `Contender`."""
        self._map = None


def _pad(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, 0) * (values.ndim - 1) + (0, length - len(values)))


class Limited:
    """A contender whose bytes come over a line while it works on them in memory.

    That is the best that it could do: all of its work behind its reading, and a batch is there when both are over.
    """

    def __init__(self, contender: Contender, limit: RateLimit) -> None:
        self.name = contender.name
        self.files = contender.files
        self._contender = contender
        self._limit = limit

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        arrives = self._limit.reserve(self._contender.stored_bytes(samples))
        batch = self._contender.batch(samples)
        self._limit.wait(arrives)
        return batch

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """See `Contender`."""
        return self._contender.stored_bytes(samples)

    def close(self) -> None:
        """See `Contender`."""
        self._contender.close()


class _OurStore:
    """Our store through another implementation: its arrays, by cache key, are opened when they are first read."""

    def __init__(self, name: str, cache: Cache, files: Path) -> None:
        self.name = name
        self.files = files
        self._ours = Ours(name, cache, "flat")
        self._arrays: dict[str, Any] = {}

    def stored_bytes(self, samples: Sequence[int]) -> int:
        """See `Contender`."""
        return self._ours.stored_bytes(samples)

    def close(self) -> None:
        """See `Contender`."""
        self._arrays.clear()


class ZarrPython(_OurStore):
    """Our store through zarr-python, with one of its codec pipelines."""

    def __init__(self, name: str, cache: Cache, files: Path, pipeline: str) -> None:
        super().__init__(name, cache, files)
        self._pipeline = pipeline

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        with zarr.config.set({"codec_pipeline.path": self._pipeline}):
            if not self._arrays:
                group = zarr.open_group(self.files, mode="r")
                self._arrays = {key: group[key] for key in CACHE_KEYS}
            rows = sorted(samples)
            return {key: array.oindex[rows] for key, array in self._arrays.items()}


class TensorStoreReader(_OurStore):
    """Our store through TensorStore."""

    def __init__(self, cache: Cache, files: Path) -> None:
        super().__init__("TensorStore", cache, files)

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        import tensorstore

        if not self._arrays:
            for key in CACHE_KEYS:
                spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self.files / key)}}
                self._arrays[key] = tensorstore.open(spec, read=True).result()
        futures = {key: [array[sample].read() for sample in samples] for key, array in self._arrays.items()}
        return {key: np.stack([future.result() for future in rows]) for key, rows in futures.items()}


class DaskReader(_OurStore):
    """Our store through dask's own Zarr reader."""

    def __init__(self, cache: Cache, files: Path) -> None:
        super().__init__("dask.array.from_zarr", cache, files)

    def batch(self, samples: Sequence[int]) -> Batch:
        """See `Contender`."""
        if not self._arrays:
            for key in CACHE_KEYS:
                chunk = json.loads((self.files / key / "zarr.json").read_text())["codecs"][0]["configuration"]
                chunks = tuple(chunk["chunk_shape"])
                self._arrays[key] = _from_zarr(zarr.open_array(self.files / key, mode="r"), chunks)
        return {key: array[list(samples)].compute(scheduler="threads") for key, array in self._arrays.items()}


def _from_zarr(array: Any, chunks: tuple[int, ...]) -> Any:  # noqa: ANN401 - dask and zarr leave it open
    import dask.array

    return dask.array.from_zarr(array, chunks=chunks)  # type: ignore[no-untyped-call] # untyped
