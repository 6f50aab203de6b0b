"""The same states written as other projects and libraries write them, each file to the disk.

Every way begins with the states of single samples, as a forward gives them, and ends when all files are synced. A
library that takes whole blocks is given a shard at a time, which is collated for it: smaller regions would make it read
and write each shard again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from safetensors.torch import save_file

from benchmarks.peers import PIPELINES
from benchmarks.samples import Samples, write_samples
from benchmarks.storage import sync_files
from dspark_store.format.dtypes import tensor_bits
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, StoreSchema

RAGGED = "ragged rows in one file (DeepSpec)"

type Write = Callable[[Path], object]
type Block = dict[str, np.ndarray]


def ways_to_write(samples: Samples, schemas: Mapping[str, StoreSchema], threads: int) -> dict[str, Write]:
    """Return what writes the samples into a new directory, by the name of who does it; ours by codec first.

    The Zarr libraries write the arrays of codec ``default``.
    """
    default = schemas["default"]
    ours: dict[str, Write] = {
        f"ours, {codec}": partial(write_samples, samples, schema, threads=threads) for codec, schema in schemas.items()
    }
    return {
        **ours,
        "safetensors shards (NeMo)": partial(_write_safetensors, samples, default),
        RAGGED: partial(_write_ragged, samples),
        **{name: partial(_write_zarr, samples, default, pipeline) for name, pipeline in PIPELINES.items()},
        "TensorStore": partial(_write_tensorstore, samples, default),
        "dask.array.store": partial(_write_dask, samples, default),
    }


def _write_safetensors(samples: Samples, schema: StoreSchema, place: Path) -> None:
    """Write padded shards."""
    place.mkdir(parents=True)
    for shard in range(schema.tokens.num_shards):
        rows = schema.tokens.rows(shard)
        shape, dtype = (len(rows), schema.seq_length), samples.dtype.torch_dtype
        tensors = {
            IDS: torch.zeros(shape, dtype=torch.int64),
            MASK: torch.zeros(shape, dtype=torch.int64),
            LAYERS: torch.zeros((*shape, samples.layers * samples.width), dtype=dtype),
            LAST: torch.zeros((*shape, samples.width), dtype=dtype),
        }
        for row, sample in enumerate(rows):
            states, length = samples.states(sample), samples.lengths[sample]
            tensors[IDS][row, :length] = torch.arange(length)
            tensors[MASK][row, :length] = 1
            torch.cat(list(states), dim=1, out=tensors[LAYERS][row, :length])
            tensors[LAST][row, :length] = states[-1]
        save_file(tensors, place / f"shard-{shard:06d}.safetensors")
    sync_files(place)


def _write_ragged(samples: Samples, place: Path) -> None:
    """Write the valid rows of every sample, one behind the other."""
    place.mkdir(parents=True)
    with (place / "samples.bin").open("wb") as file:
        for sample, length in enumerate(samples.lengths):
            states = samples.states(sample)
            file.write(np.arange(length, dtype=np.int32).tobytes())
            for values in (torch.cat(list(states), dim=1), states[-1]):
                file.write(memoryview(values.contiguous().view(torch.uint8).numpy()))
            file.write(bytes([1]) * length)
    sync_files(place)


def _blocks(samples: Samples, schema: StoreSchema) -> Iterator[tuple[slice, Block]]:
    """Yield whole shards as stored values, with the fill values past every sample's end."""
    stored = schema.dtype.stored
    for shard in range(schema.tokens.num_shards):
        rows = schema.tokens.rows(shard)
        shape = (len(rows), schema.seq_length)
        block: Block = {
            IDS: np.full(shape, -1, np.int32),
            MASK: np.full(shape, 255, np.uint8),
            LAYERS: np.full((*shape, samples.layers * samples.width), schema.dtype.fill_bits, schema.dtype.bits),
            LAST: np.full((*shape, samples.width), schema.dtype.fill_bits, schema.dtype.bits),
        }
        for row, sample in enumerate(rows):
            length = samples.lengths[sample]
            layers = [tensor_bits(states) for states in samples.states(sample)]
            block[IDS][row, :length] = np.arange(length)
            block[MASK][row, :length] = 1
            np.concatenate(layers, axis=1, out=block[LAYERS][row, :length])
            block[LAST][row, :length] = layers[-1]
        yield slice(rows.start, rows.stop), block | {name: block[name].view(stored) for name in (LAYERS, LAST)}


def _make_arrays(schema: StoreSchema, place: Path) -> None:
    """Write the metadata of the store's four columns."""
    for name, spec in schema.columns().items():
        (place / name).mkdir(parents=True)
        (place / name / "zarr.json").write_text(json.dumps(spec.document()))


def _write_zarr(samples: Samples, schema: StoreSchema, pipeline: str, place: Path) -> None:
    _make_arrays(schema, place)
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        arrays: dict[str, Any] = {name: zarr.open_array(place / name, mode="r+") for name in schema.columns()}
        for rows, block in _blocks(samples, schema):
            for name, values in block.items():
                arrays[name][rows] = values
    sync_files(place)


def _write_tensorstore(samples: Samples, schema: StoreSchema, place: Path) -> None:
    import tensorstore

    _make_arrays(schema, place)
    arrays = {}
    for name in schema.columns():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(place / name)}}
        arrays[name] = tensorstore.open(spec).result()
    for rows, block in _blocks(samples, schema):
        for written in [arrays[name][rows].write(values) for name, values in block.items()]:
            written.result()
    sync_files(place)


def _write_dask(samples: Samples, schema: StoreSchema, place: Path) -> None:
    import dask.array

    da: Any = dask.array  # it is annotated in part

    _make_arrays(schema, place)
    arrays = {name: zarr.open_array(place / name, mode="r+") for name in schema.columns()}
    for rows, block in _blocks(samples, schema):
        sources = [_lazy(da, values, schema.hidden_size) for values in block.values()]
        targets = [arrays[name] for name in block]
        da.store(sources, targets, regions=[(rows,)] * len(sources), lock=False, scheduler="threads")
    sync_files(place)


def _lazy(da: Any, values: np.ndarray, width: int) -> Any:  # noqa: ANN401 - dask leaves it open
    """Return a block as a dask array of whole shards: layer by layer, where there are any."""
    return da.from_array(values, chunks=(*values.shape[:2], width)[: values.ndim])
