"""A store is plain Zarr v3: stock implementations see every array as the reader does, and fill values elsewhere."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dspark_store import open_cache, read_weights
from dspark_store.format.ledger import Ledger
from dspark_store.format.schema import (
    COLUMNS,
    EMBED,
    HEAD,
    IDS,
    INDEX_DIGEST,
    INDEX_LENGTH,
    INDEX_OBJECTS,
    INDEX_STATUS,
    INDEX_SUPERVISED,
    LAST,
    LAYERS,
    MASK,
    STATE_LEDGER,
    TOKEN_LEDGER,
)
from dspark_store.readers.cache import Cache
from tests.stores import RAGGED, Shape, bits, build_store

DUMP = Path(__file__).with_name("dump.py")
DECODERS = ("zarr", "zarrs", "tensorstore")
TOKEN_DTYPES = {IDS: np.int32, MASK: np.uint8}
LAZY_ARRAYS = ("xarray", "dask")
"""Both decode through zarr-python; what is theirs is how they make sense of the metadata."""


@dataclass(frozen=True)
class Stores:
    """Stores that every implementation must read, and those with ``dense``, which TensorStore cannot.

    The first three of ``stock`` have the three dtypes.
    """

    stock: tuple[Path, ...]
    dense: tuple[Path, ...]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    root = tmp_path_factory.mktemp("stores")
    pairs = [(dtype, "default") for dtype in ("bf16", "fp16", "fp32")] + [("bf16", "none"), ("fp32", "fast")]
    stock = [build_store(root / f"{dtype}-{codec}", dtype=dtype, codec=codec).path for dtype, codec in pairs]
    even = Shape(seq_length=16, shard_size=9, chunk_tokens=16, layer_ids=(0,))
    stock.append(build_store(root / "one-shard", shape=even, lengths=(16, 1, 5), tied=True, shared_last=False).path)
    dense = [
        build_store(root / f"{dtype}-dense", dtype=dtype, codec="dense").path for dtype in ("bf16", "fp16", "fp32")
    ]
    return Stores(tuple(stock), tuple(dense))


def dump(implementation: str, paths: tuple[Path, ...], out: Path) -> Iterator[tuple[Path, dict[str, np.ndarray]]]:
    """Read stores in a program of its own, in which any warning is an error, and yield what it saw of each."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-I", "-W", "error", str(DUMP), implementation, str(out), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for path in paths:
        with np.load(out / f"{path.name}.npz") as arrays:
            yield path, dict(arrays)


def raw(values: np.ndarray) -> np.ndarray:
    """View values as integers, so that NaN and -0.0 compare as what they are."""
    return values.view(f"u{values.dtype.itemsize}")


def stock_view(path: Path) -> dict[str, np.ndarray]:
    """Say what plain Zarr must give for every array of a store, from what the package's reader gives."""
    cache = open_cache(path)
    batch = cache.read(range(len(cache)))
    dtype = cache.schema.dtype
    fills = {IDS: -1, MASK: 255, LAYERS: dtype.fill_bits, LAST: dtype.fill_bits}
    arrays = {}
    for column in COLUMNS:
        states = column in (LAYERS, LAST)
        values = bits(batch[column]).view(dtype.bits) if states else batch[column].numpy().astype(TOKEN_DTYPES[column])
        for row, length in enumerate(cache.lengths):
            values[row, length:] = fills[column]
        arrays[column] = values.view(dtype.stored) if states else values
    weights = read_weights(cache.storage, cache.record)
    arrays[EMBED], arrays[HEAD] = (bits(table).view(dtype.stored) for table in (weights.embed, weights.head))
    return arrays | index_view(cache)


def index_view(cache: Cache) -> dict[str, np.ndarray]:
    index, objects, shards = cache.index, cache.schema.num_layers + 4, range(cache.schema.tokens.num_shards)
    records = [[index.object_record(shard, item) for item in range(objects)] for shard in shards]
    table = np.array([[(record.nbytes, record.digest) for record in row] for row in records], np.uint64)
    ledgers = {TOKEN_LEDGER: 3, STATE_LEDGER: objects - 3}
    return {
        INDEX_LENGTH: index.length,
        INDEX_SUPERVISED: index.supervised,
        INDEX_DIGEST: index.digest,
        INDEX_STATUS: index.status,
        INDEX_OBJECTS: table,
        **{
            path: np.stack([Ledger(cache.storage, path, n).row(shard) for shard in shards])
            for path, n in ledgers.items()
        },
    }


def assert_equal(seen: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], where: object) -> None:
    for path, values in expected.items():
        assert seen[path].dtype == values.dtype, (where, path)
        assert np.array_equal(raw(seen[path]), raw(values)), (where, path)


@pytest.mark.parametrize("implementation", [*DECODERS, *LAZY_ARRAYS])
def test_a_stock_implementation_sees_what_the_reader_sees(implementation: str, stores: Stores, tmp_path: Path) -> None:
    paths = stores.stock if implementation in DECODERS else stores.stock[:3]
    for path, seen in dump(implementation, paths, tmp_path / "out"):
        expected = stock_view(path)
        columns = COLUMNS if implementation == "dask" else expected
        assert set(seen) == set(columns)
        assert_equal(seen, {name: expected[name] for name in columns}, (implementation, path.name))


@pytest.mark.parametrize("implementation", ["zarr", "zarrs"])
def test_the_dense_codec_is_read_by_zarr_python_and_zarrs(implementation: str, stores: Stores, tmp_path: Path) -> None:
    for path, seen in dump(implementation, stores.dense, tmp_path / "out"):
        assert_equal(seen, stock_view(path), (implementation, path.name))


def test_stock_implementations_give_the_true_values_of_codes_and_minus_infinity_past_an_end(tmp_path: Path) -> None:
    shape = Shape(hidden_size=12)
    store = build_store(tmp_path / "codes", dtype="int8", shape=shape, weights=False)
    (_, seen), *_ = dump("values", (store.path,), tmp_path / "out")
    states = open_cache(store.path).read(range(len(RAGGED)), layout="stacked")[LAYERS].transpose(1, 2).float().numpy()
    for row, length in enumerate(RAGGED):
        states[row, length:] = -np.inf
    assert set(seen) == {"zarr", "xarray", "tensorstore"}
    assert_equal(seen, dict.fromkeys(seen, states), "codes")


def test_positions_past_a_samples_end_are_nan_to_stock_readers(stores: Stores) -> None:
    arrays = stock_view(next(path for path in stores.stock if path.name == "fp32-default"))
    ends = [np.isnan(row).all(axis=-1) for row in arrays[LAST]]
    assert [int((~end).sum()) for end in ends] == list(RAGGED)
