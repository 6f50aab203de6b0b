"""The tensors of a batch: their shapes, the memory they share, and their way to a device."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal, Self

import numpy as np
import torch

from dspark_store.format.dtypes import bits_tensor, tensor_bits
from dspark_store.format.int8 import dequantise
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK, StoreSchema

type Batch = dict[str, torch.Tensor]
type Layout = Literal["flat", "stacked"]
"""Of ``target_hidden_states``: "flat" is (B, S, K*H), "stacked" (B, K, S, H), in which chunks land in one piece."""


def chosen_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns; ValueError when one is not a column of a store."""
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown:
        raise ValueError(f"column {unknown[0]!r} is unknown; choose from {', '.join(COLUMNS)}")
    return tuple(columns)


def chosen_slots(schema: StoreSchema, layers: Sequence[int] | None) -> list[int]:
    """Return the slots of captured layers, by id; all for None. ValueError for one that was not captured."""
    if layers is None:
        return list(range(schema.num_layers))
    missing = [layer for layer in layers if layer not in schema.layer_ids]
    if missing:
        raise ValueError(f"layer {missing[0]} was not captured; the store has {list(schema.layer_ids)}")
    return [schema.layer_ids.index(layer) for layer in layers]


def chosen_span(schema: StoreSchema, positions: slice | None) -> tuple[int, int]:
    """Return the start and stop of a slice of positions; ValueError when its step is not 1."""
    if positions is not None and not isinstance(positions, slice):
        raise ValueError(f"positions must be a slice, got {positions!r}")
    start, stop, step = (positions or slice(None)).indices(schema.seq_length)
    if step != 1:
        raise ValueError(f"positions must be a slice of step 1, got {positions}")
    return start, max(start, stop)


def batch_shape(
    schema: StoreSchema, column: str, batch: int, layers: int, length: int, layout: Layout
) -> tuple[int, ...]:
    """Return the shape of a column of a batch of ``length`` positions; ValueError for an unknown layout."""
    if layout not in ("flat", "stacked"):
        raise ValueError(f"the layout is {layout!r}; choose from flat, stacked")
    width = schema.hidden_size
    if column in (IDS, MASK):
        return batch, length
    if column == LAST:
        return batch, length, width
    return (batch, layers, length, width) if layout == "stacked" else (batch, length, layers * width)


def column_dtype(schema: StoreSchema, column: str, dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of a column of a batch, whose states are to be ``dtype``; None for the store's."""
    return torch.int64 if column in (IDS, MASK) else dtype or schema.dtype.torch_dtype


def read_shape(
    schema: StoreSchema, dtype: torch.dtype | None, *, dequantise: bool
) -> tuple[StoreSchema, torch.dtype | None]:
    """Return the shape of a batch's states, of values or of codes, and their dtype; ValueError for one of no states."""
    if dtype is not None and not (dequantise and dtype.is_floating_point):
        raise ValueError(f"dtype {dtype} is none of states: give a dtype of floats, or dequantise=False for codes")
    return (schema if dequantise else schema.stored), dtype


def batch_tensor(
    schema: StoreSchema,
    column: str,
    shape: tuple[int, ...],
    given: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the tensor to fill for a column: ``given``, or a new one. ValueError when the given one does not fit."""
    dtype = column_dtype(schema, column, dtype)
    if given is None:
        return torch.empty(shape, dtype=dtype)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device.type != "cpu":
        raise ValueError(f"out[{column!r}] must be {shape} {dtype} on the CPU, got {tuple(given.shape)} {given.dtype}")
    if _overlaps_itself(given):
        raise ValueError(
            f"out[{column!r}] keeps several elements in the same memory (strides {given.stride()}), as an expanded "
            "tensor does: give one whose elements are apart, such as a clone"
        )
    return given


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def state_view(column: str, target: torch.Tensor, schema: StoreSchema) -> np.ndarray:
    """View a state tensor, or one of codes, as stored values, (B, K, positions, H or W), whatever its layout.

    A tensor of another dtype than the store's is viewed as its bits.
    """
    if target.dtype == torch.int8:
        schema = schema.stored
    if column == LAST:
        target = target.unsqueeze(1)
    elif target.ndim == 3:
        width = schema.hidden_size
        target = target.view(*target.shape[:2], target.shape[2] // width, width).transpose(1, 2)
    bits = tensor_bits(target)
    return bits.view(schema.dtype.stored) if target.dtype == schema.dtype.torch_dtype else bits


class Conversion:
    """What turns the stored values of a column into states of another dtype: of codes, their values."""

    def __init__(self, schema: StoreSchema, column: str, dtype: torch.dtype) -> None:
        self._schema, self._column, self._dtype = schema, column, dtype
        self.width, self.stored = schema.stored.hidden_size, schema.stored.dtype

    @classmethod
    def to(cls, schema: StoreSchema, column: str, dtype: torch.dtype) -> Self | None:
        """Return the conversion to ``dtype``; None where values are stored so."""
        return None if dtype == schema.stored.dtype.torch_dtype else cls(schema, column, dtype)

    def __call__(self, values: np.ndarray, slot: int, target: np.ndarray) -> None:
        """Convert stored values of a layer slot, (n, width), into ``target``, (n, H): its bits."""
        stored, states = bits_tensor(values, self.stored.torch_dtype), bits_tensor(target, self._dtype)
        if self._schema.int8 is None:
            states.copy_(stored)
        else:
            dequantise(stored, self._schema.scale(self._column, slot).high_channels, states)


def decoded(schema: StoreSchema, slots: Sequence[int], dtype: torch.dtype | None, batch: Batch) -> Batch:
    """Return a batch of codes as states of ``dtype``, None for the store's, on the device where it is.

    ``slots`` are its layers; the layout stays.
    """
    result = dict(batch)
    for column in batch.keys() & {LAYERS, LAST}:
        codes, width = batch[column], schema.stored.hidden_size
        shape = (*codes.shape[:-1], codes.shape[-1] // width * schema.hidden_size)
        states = torch.empty(shape, dtype=column_dtype(schema, column, dtype), device=codes.device)
        for place, slot in enumerate([0] if column == LAST else slots):
            scale = schema.scale(column, slot)
            into = _layer(states, place, schema.hidden_size)
            dequantise(_layer(codes, place, width), scale.high_channels, into)
        result[column] = states
    return result


def _layer(states: torch.Tensor, place: int, width: int) -> torch.Tensor:
    return states[:, place] if states.ndim == 4 else states[..., place * width : (place + 1) * width]


_LEAST_BYTES = 4096


class BlockPool:
    """Leases blocks of bytes, pinned where there is CUDA.

    A lease is a plain tensor. When the last tensor over its storage is gone, views of it included, the block returns to
    the pool; a consumer that keeps its batches keeps their blocks, and nothing is ever overwritten under it. Leased and
    free blocks take at most ``limit_bytes`` together, unless the leased ones alone take more; the free blocks of the
    size that was not asked for the longest are given up first. One thread leases; blocks return from any.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._returned: deque[torch.Tensor] = deque()
        self._free: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self.nbytes = 0
        """What leased and free blocks take together."""
        self._pin = torch.cuda.is_available()
        self._closed = False

    @staticmethod
    def block_bytes(nbytes: int) -> int:
        """Return the size of the block that a lease of ``nbytes`` takes.

        Sizes are eighths of a power of two apart, so that batches of about one size share their blocks, and a block is
        larger than was asked for by an eighth at most (or is 4 KiB).
        """
        if nbytes <= _LEAST_BYTES:
            return _LEAST_BYTES
        step = 1 << (nbytes - 1).bit_length() - 4
        return -(-nbytes // step) * step

    def lease(self, nbytes: int) -> torch.Tensor:
        """Return a block of at least ``nbytes`` bytes, uint8, of any content."""
        size = self.block_bytes(nbytes)
        self._collect()
        same = self._free.get(size)
        if same:
            block = same.pop()
            self._free.move_to_end(size)
        else:
            self._trim(self._limit - size)
            block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if self._pin else _mapped(size)
            self.nbytes += size
        array = block.numpy()
        # from_numpy holds this very array object as long as the storage lives; a deque's append needs no lock, so that
        # the finalizer may run at any point, in any thread.
        weakref.finalize(array, self._give_back, block).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Give the free blocks up; leased ones go when their tensors do."""
        self._closed = True
        self._returned.clear()
        self._free.clear()

    def _collect(self) -> None:
        """Take stock of what came back since the last lease."""
        for _ in range(len(self._returned)):
            block = self._returned.popleft()
            self._free.setdefault(block.numel(), []).append(block)
        self._trim(self._limit)

    def _trim(self, limit: int) -> None:
        """Give free blocks up until all blocks take at most ``limit`` bytes, or none is free."""
        while self.nbytes > limit and self._free:
            size, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                self.nbytes -= size
            else:
                del self._free[size]

    def _give_back(self, block: torch.Tensor) -> None:
        if not self._closed:
            self._returned.append(block)


def _mapped(nbytes: int) -> torch.Tensor:
    """Return memory straight from the system, in huge pages where it has them, which goes back there when freed.

    An allocator would keep a freed block for later, and map it in small pages.
    """
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_ALIGNMENT = 64


class BatchMemory:
    """Gives out the tensors of batches: the chosen ``columns``, with ``layers`` captured layers in a ``layout``.

    States are of ``dtype``, None for the schema's.
    """

    def __init__(
        self,
        schema: StoreSchema,
        columns: Sequence[str],
        layers: int,
        layout: Layout,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._schema = schema
        self._dtype = dtype
        self._columns = tuple(columns)
        self._layers = layers
        self._layout: Layout = layout
        self._blocks = BlockPool(0)
        self._tensors(0, 0)  # refuses an unknown layout

    def open(self, limit_bytes: int) -> None:
        """Start over with a pool of blocks that takes at most ``limit_bytes``; see `BlockPool`."""
        self._blocks.close()
        self._blocks = BlockPool(limit_bytes)

    def close(self) -> None:
        """Let go of the blocks that no batch uses."""
        self._blocks.close()

    def nbytes(self, rows: int, length: int) -> int:
        """Return the memory that a batch of ``rows`` rows of ``length`` positions takes."""
        return BlockPool.block_bytes(sum(_padded(nbytes) for _, _, nbytes in self._tensors(rows, length)))

    def lease(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch, of any content. Their block is used again once none of them is left."""
        block = self._blocks.lease(self.nbytes(rows, length))
        batch: dict[str, torch.Tensor] = {}
        offset = 0
        for column, shape, nbytes in self._tensors(rows, length):
            dtype = column_dtype(self._schema, column, self._dtype)
            batch[column] = block[offset : offset + nbytes].view(dtype).view(shape)
            offset += _padded(nbytes)
        return batch

    def _tensors(self, rows: int, length: int) -> list[tuple[str, tuple[int, ...], int]]:
        tensors = []
        for column in self._columns:
            shape = batch_shape(self._schema, column, rows, self._layers, length, self._layout)
            itemsize = column_dtype(self._schema, column, self._dtype).itemsize
            tensors.append((column, shape, math.prod(shape) * itemsize))
        return tensors


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class DeviceCopy:
    """Copies a batch to a CUDA device on a stream of its own; without one it hands the batch on as it is.

    ``decode`` is what is then done with it there, such as `decoded`.
    """

    def __init__(self, device: torch.device | None, decode: Callable[[Batch], Batch] | None = None) -> None:
        self._device = device
        self._decode = decode
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # untyped in torch

    @classmethod
    def to(cls, device: torch.device | str | None, decode: Callable[[Batch], Batch] | None = None) -> Self:
        """Return the copy for a device; None and the CPU need none. ValueError for another kind of device."""
        try:
            wanted = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device {device!r} is unknown: expected cpu, cuda or cuda:N") from error
        if wanted is None or wanted.type == "cpu":
            return cls(None)
        if wanted.type != "cuda":
            raise ValueError(f"batches are copied to a CUDA device or stay on the CPU, got device {device!r}")
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} is not there: torch sees no CUDA device")
        return cls(wanted, decode)

    @property
    def decodes(self) -> bool:
        """Whether it must be given what is to be decoded on the device."""
        return self._device is not None and self._decode is not None

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch on the device.

        Runs in the prefetching thread, which waits for its own copy: the pinned block may then be used again, and the
        consumer finds the batch there.
        """
        if self._device is None or self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            copied = {name: values.to(self._device, non_blocking=True) for name, values in batch.items()}
            copied = copied if self._decode is None else self._decode(copied)
        self._stream.synchronize()
        return copied

    def receive(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hand a copied batch to the consumer's stream, so that its memory waits for what is computed there."""
        if self._device is not None:
            for values in batch.values():
                values.record_stream(torch.cuda.current_stream(self._device))
        return batch
