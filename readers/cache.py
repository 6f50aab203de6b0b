"""A store opened for reading: its samples, and batches of them."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

import numpy as np
import torch
import zarr

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import Manifest, StoreRecord
from dspark_store.format.metadata import read_metadata, read_record, record_nodes
from dspark_store.format.schema import COLUMNS, StoreSchema
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.readers.batch import BatchReader, SpanReader
from dspark_store.readers.fetch import Verify
from dspark_store.readers.foreign import ForeignColumn
from dspark_store.readers.index import StoreIndex, TargetWeights, read_weights
from dspark_store.readers.plan import padded_spans
from dspark_store.readers.ranges import DEFAULT_IN_FLIGHT, DEFAULT_OPEN_OBJECTS
from dspark_store.readers.tensors import (
    Layout,
    batch_shape,
    batch_tensor,
    chosen_columns,
    chosen_slots,
    chosen_span,
    decoded,
    read_shape,
)
from dspark_store.readers.threads import DEFAULT_THREADS

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr

    from dspark_store.readers.lazy import DraftVocabulary


def open_cache(
    path: str | os.PathLike[str],
    *,
    allow_incomplete: bool = False,
    allow_reduced_depth: bool = False,
    verify: Verify = "first",
    threads: int = DEFAULT_THREADS,
    in_flight: int | None = None,
    open_objects: int = DEFAULT_OPEN_OBJECTS,
) -> Cache:
    """Open a store for reading; cheap, whatever its size.

    Args:
        path: the store's directory.
        allow_incomplete: admit a store that is still being written.
        allow_reduced_depth: admit a store of a target that was cut to its first layers, from which no draft of the
            whole target can be trained.
        verify: when checksums are compared: "first", the first time that this process reads a chunk, or reads it after
            its object has changed; True, at every read; False, never.
        threads: threads that decode; by default one per usable core, 2 to 8.
        in_flight: requests to the storage at a time, of several batches; None for two per usable core, 4 to 16, or
            ``threads`` where more.
        open_objects: files that are open at once, at most; one per request in flight where that is more.

    Returns:
        The store; its samples are read when they are asked for.

    Raises:
        FileNotFoundError: there is no store.
        ValueError: it is incomplete, of a cut target, or of another format version.
        DamagedStoreError: its metadata is not what was written.
    """
    cache = Cache(
        LocalStorage(path),
        allow_incomplete=allow_incomplete,
        verify=verify,
        threads=threads,
        in_flight=in_flight,
        open_objects=open_objects,
    )
    if not allow_reduced_depth:
        _refuse_reduced_depth(cache)
    return cache


def _refuse_reduced_depth(cache: Cache) -> None:
    depth, whole = (cache.manifest.get(name) for name in ("num_hidden_layers", "target_num_hidden_layers_full"))
    if whole is not None:
        raise ValueError(
            f"store at {cache.storage} is of a target cut to its first {depth} of {whole} layers "
            "(target_num_hidden_layers): capture the whole target, or pass allow_reduced_depth=True"
        )


def _refuse_incomplete(record: StoreRecord, storage: Storage) -> None:
    if not record.complete:
        job, mended = ("precompute", "the precompute again with --resume")
        if record.copied_from is not None:
            job, mended = ("copy", "dspark-store rechunk again")
        raise ValueError(
            f"store at {storage} is incomplete (its {job} was interrupted or still runs): run {mended} to finish it"
        )


class Cache:
    """A store's samples: ``len(cache)``, ``cache[i]``, and `read` for batches. Picklable: it travels as its path.

    ``cache[0:3]`` and ``cache[[1, 2]]`` are `read` of those rows; ``with open_cache(...) as cache`` closes it.

    A sample has four keys: ``input_ids`` and ``loss_mask``, (S,) int64; ``target_hidden_states``, (S, K*H), and
    ``target_last_hidden_states``, (S, H), in the cache dtype. Positions at or past the sample's length hold the pad
    token id, 0 and zeros.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        allow_incomplete: bool = False,
        verify: Verify = "first",
        threads: int = DEFAULT_THREADS,
        in_flight: int | None = None,
        open_objects: int = DEFAULT_OPEN_OBJECTS,
    ) -> None:
        self.storage = storage
        self.verify = verify
        if not allow_incomplete:
            _refuse_incomplete(read_record(storage), storage)
        metadata = read_metadata(storage)
        self.record = metadata.record
        self.index = StoreIndex(storage, self.record)
        expected = record_nodes(self.record)
        self._foreign = {
            column: ForeignColumn(storage, column, self.schema.stored)
            for column in COLUMNS
            if metadata.nodes[column] != expected[column]
        }
        limits = {"threads": threads, "in_flight": in_flight, "open_objects": open_objects}
        self._options: dict[str, Any] = {"allow_incomplete": allow_incomplete, "verify": verify, **limits}
        self.reader: SpanReader = BatchReader(
            storage,
            self.record,
            self.index,
            self._foreign,
            pad_token_id=self.pad_token_id,
            verify=verify,
            threads=threads,
            in_flight=max(threads, min(DEFAULT_IN_FLIGHT, open_objects // 2)) if in_flight is None else in_flight,
            open_objects=open_objects,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Cache, self.storage, **self._options), ()

    def __repr__(self) -> str:
        return f"Cache({self.storage!r}, samples={len(self)}, layers={list(self.layer_ids)})"

    def _repr_html_(self) -> str:
        rows = {
            "store": self.storage,
            "samples": f"{len(self):,} of at most {self.schema.seq_length:,} tokens",
            "layers": ", ".join(map(str, self.layer_ids)),
            "states": f"{self.schema.dtype.name}, {self.schema.hidden_size:,} wide",
            "complete": "yes" if self.record.complete else "no",
        }
        return f"<table>{''.join(f'<tr><th>{name}<td>{escape(str(value))}' for name, value in rows.items())}</table>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def can_train(self) -> bool:
        """Whether all of its samples have states, so that a loader may give them."""
        return self.record.complete

    @property
    def schema(self) -> StoreSchema:
        """The shape of the store."""
        return self.record.schema

    @property
    def manifest(self) -> Manifest:
        """The manifest, as the precompute wrote it."""
        return self.record.manifest

    @property
    def target_config(self) -> Mapping[str, JsonValue] | None:
        """The target's text configuration as JSON."""
        return self.record.target_config

    @property
    def head(self) -> Mapping[str, JsonValue]:
        """What a draft must know of the target beside its embedding and head: bias, tie, logit scale, softcap."""
        return self.record.head

    def weights(self) -> TargetWeights:
        """Read the target's embedding and head; see `read_weights`."""
        return read_weights(self.storage, self.record)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The captured layers, in slot order.

        Id i is the output of decoder layer i, ``hidden_states[i + 1]`` of transformers: -1 is the embedding, and the
        last layer comes after the final norm. `convert_layer_ids` knows how engines count.
        """
        return self.schema.layer_ids

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states."""
        return self.schema.dtype.torch_dtype

    @property
    def pad_token_id(self) -> int:
        """The id that stands past a sample's end."""
        pad = self.manifest.get("pad_token_id")
        return pad if isinstance(pad, int) else 0

    @property
    def foreign_columns(self) -> frozenset[str]:
        """The columns that somebody rewrote with other codecs or chunks; they have no trailers."""
        return frozenset(self._foreign)

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int32: tokens of each sample."""
        return self.index.length

    @property
    def supervised(self) -> np.ndarray:
        """(N,) int32: supervised tokens of each sample."""
        return self.index.supervised

    @property
    def source(self) -> np.ndarray:
        """(N,) uint16: the number of each sample's source, ``sources[source[i]]`` its name; all 0 without a blend."""
        return self.index.source

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the blend's sources, by the numbers in ``source``; empty where there was one source."""
        return self.schema.sources

    @property
    def status(self) -> np.ndarray:
        """(N,) uint8: 0 for a good sample, 1 for one with non-finite states."""
        return self.index.status

    @property
    def zarr(self) -> zarr.Group:
        """The store as zarr-python opens it, read-only: raw values, NaN and -1 where nothing is stored."""
        if not isinstance(self.storage, LocalStorage):
            raise ValueError(f"zarr-python opens local stores only, not {self.storage}")
        return zarr.open_group(self.storage.root, mode="r")

    def dask(self, column: str) -> da.Array:
        """Return a column as a lazy dask array of the values that `read` gives; see `dask_column`."""
        from dspark_store.readers.lazy import dask_column

        return dask_column(self, column)

    def xarray(self) -> xr.Dataset:
        """Return the columns decoded, labelled and lazy; see `labelled_columns`."""
        from dspark_store.readers.lazy import labelled_columns

        return labelled_columns(self)

    def token_counts(self, *, supervised: bool = False) -> np.ndarray:
        """Return how often each token id occurs, (V,) int64, in all tokens or in supervised ones; reads no states."""
        from dspark_store.readers.lazy import token_counts

        return token_counts(self, supervised=supervised)

    def draft_vocabulary(self, size: int) -> DraftVocabulary:
        """Return the ``size`` ids that are supervised most often, as a draft's vocabulary; see `DraftVocabulary`.

        ValueError when ``size`` is not between 1 and V.
        """
        from dspark_store.readers.lazy import draft_vocabulary

        return draft_vocabulary(self, size)

    def __len__(self) -> int:
        return self.schema.num_samples

    def __getitem__(self, index: SupportsIndex | slice | Iterable[SupportsIndex]) -> dict[str, torch.Tensor]:
        """Return one sample, padded to S; of a slice or several indices the batch that `read` gives.

        Negative indices count from the end, IndexError past either end.
        """
        if isinstance(index, slice):
            return self.read(range(len(self))[index])
        if isinstance(index, Iterable) and getattr(index, "ndim", 1) != 0:  # a tensor of one number is iterable too
            return self.read(index)
        batch = self.read([cast("SupportsIndex", index)])
        return {name: values[0] for name, values in batch.items()}

    def read(
        self,
        rows: Iterable[SupportsIndex],
        *,
        columns: Sequence[str] = COLUMNS,
        layers: Sequence[int] | None = None,
        positions: slice | None = None,
        layout: Layout = "flat",
        dtype: torch.dtype | None = None,
        dequantise: bool = True,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read a batch of B samples.

        Args:
            rows: sample numbers; negative ones count from the end.
            columns: the columns to read; no other column's bytes are.
            layers: captured layers by id, in the order of the result; only their bytes are read. None for all.
            positions: a slice of step 1 of the S positions; only its span is read.
            layout: ``target_hidden_states`` as "flat", (B, S, K*H), or "stacked", (B, K, S, H).
            dtype: that of the states; None for the cache dtype.
            dequantise: False gives the codes of an int8 store as they are stored, int8, W values in place of H: see
                `split_codes` and `dequantise`.
            out: tensors to fill, by column, of the shapes and dtypes below, on the CPU; new ones without.

        Returns:
            By column: ``input_ids`` and ``loss_mask``, (B, S) int64; ``target_hidden_states`` as in ``layout`` and
            ``target_last_hidden_states``, (B, S, H), in ``dtype``. S is the number of positions asked for.

        Raises:
            IndexError: a row is outside the store.
            ValueError: a column, layer, slice or tensor does not fit, or the sample is not captured yet.
            DamagedStoreError: a chunk is not what was written; names column, layer, sample, shard and object.
            OSError: an object cannot be read; names the same.
        """
        samples = [self._wrap(row) for row in rows]
        if self.record.phase == "tokens":
            raise ValueError(f"store at {self.storage} is still in its token phase: its samples cannot be read yet")
        columns, _ = chosen_columns(columns), chosen_columns(list(out or ()))
        slots = chosen_slots(self.schema, layers)
        start, stop = chosen_span(self.schema, positions)
        schema, dtype = read_shape(self.schema, dtype, dequantise=dequantise)
        batch: dict[str, torch.Tensor] = {}
        for column in columns:
            shape = batch_shape(schema, column, len(samples), len(slots), stop - start, layout)
            batch[column] = batch_tensor(schema, column, shape, (out or {}).get(column), dtype)
        self.reader.read(padded_spans(samples, self.lengths[samples].tolist(), start, stop), slots, batch)
        return batch

    def dequantise(
        self,
        batch: Mapping[str, torch.Tensor],
        *,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return a batch that was read with ``dequantise=False`` as `read` gives it, on the device where its codes are.

        ``layers`` are those it was read with, ``dtype`` that of the states, None for the cache dtype.
        """
        return decoded(self.schema, chosen_slots(self.schema, layers), dtype, dict(batch))

    def close(self) -> None:
        """Let go of threads and open objects; the next read takes new ones."""
        self.reader.close()

    def _wrap(self, row: SupportsIndex) -> int:
        if isinstance(row, bool | np.bool_) or getattr(row, "dtype", None) is torch.bool:
            raise ValueError("rows are sample numbers, not a mask; give np.flatnonzero(mask)")
        try:
            number = operator.index(row)
        except TypeError as error:
            raise ValueError(f"rows are sample numbers, got {row!r}") from error
        sample = number + len(self) if number < 0 else number
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {row} is outside the store's {len(self)} samples")
        return int(sample)
