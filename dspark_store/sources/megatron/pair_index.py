"""The index of a pair `<prefix>.idx` and `<prefix>.bin`, as Megatron-LM writes it: its bytes, read and checked.

The index is packed and little-endian: magic (9 bytes), version (u64), dtype code (u8), number of sequences N (u64),
number of document boundaries B = documents + 1 (u64), then i32[N] tokens per sequence, i64[N] byte offsets into the
`.bin`, i64[B] boundaries (the sequence that each document starts with, and N at the end), and, in multimodal pairs
only, i8[N] modes. The `.bin` holds the sequences back to back.
"""

import logging
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LENGTH = np.dtype("<i4")
POINTER = np.dtype("<i8")
BOUNDARY = np.dtype("<i8")
MODE = np.dtype("i1")
TEXT_MODE = 0

DTYPES: Mapping[int, np.dtype[np.generic]] = MappingProxyType(
    {
        1: np.dtype("u1"),
        2: np.dtype("i1"),
        3: np.dtype("<i2"),
        4: np.dtype("<i4"),
        5: np.dtype("<i8"),
        6: np.dtype("<f8"),
        7: np.dtype("<f4"),
        8: np.dtype("<u2"),
    }
)
"""dtype code in the header -> dtype of the `.bin`. There is no code for uint32."""

SMALLEST_INT32_VOCABULARY = 65500
"""Megatron-LM's writer keeps smaller vocabularies as uint16, and the others as int32."""


@dataclass(frozen=True, slots=True)
class PairPaths:
    """The two files of a pair."""

    prefix: Path

    @property
    def idx(self) -> Path:
        """The index."""
        return self.prefix.with_name(self.prefix.name + ".idx")

    @property
    def bin(self) -> Path:
        """The tokens."""
        return self.prefix.with_name(self.prefix.name + ".bin")


def find_pair(path: str | PathLike[str]) -> PairPaths:
    """Return the pair that a path means: its prefix, or either of its files.

    Raises:
        FileNotFoundError: one of the two files is not there.

    """
    given = Path(fspath(path))
    pair = PairPaths(given)
    if not pair.idx.exists() and given.suffix in (".bin", ".idx"):  # a prefix may itself end in .bin
        pair = PairPaths(given.with_suffix(""))
    missing = [file for file in (pair.idx, pair.bin) if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{missing[0]}: no such file; a Megatron pair is PREFIX.idx and PREFIX.bin, and the path given is its "
            f"prefix or either file (given: {given})"
        )
    return pair


def dtype_code(dtype: np.dtype[np.generic]) -> int:
    """Return the code of a dtype, whatever its byte order; ValueError if the format has none for it."""
    for code, known in DTYPES.items():
        if known == dtype.newbyteorder("<"):
            return code
    names = ", ".join(known.name for known in DTYPES.values())
    raise ValueError(f"dtype {dtype.name} has no code in a Megatron index; expected one of {names}")


def dtype_for_vocabulary(size: int | None) -> np.dtype[np.generic]:
    """Return the dtype that Megatron-LM's writer picks: uint16 below 65500 ids, int32 from there on or if unknown."""
    return DTYPES[8] if size is not None and size < SMALLEST_INT32_VOCABULARY else DTYPES[4]


def index_size(num_sequences: int, num_boundaries: int, *, multimodal: bool) -> int:
    """Return the bytes of an index."""
    per_sequence = LENGTH.itemsize + POINTER.itemsize + (MODE.itemsize if multimodal else 0)
    return HEADER.size + num_sequences * per_sequence + num_boundaries * BOUNDARY.itemsize


logger = logging.getLogger(__name__)

_BLOCK = 1 << 20  # entries checked at a time, so that validation needs no second copy of a large index
_LAST_BYTE = 1 << 62  # a pointer past it is damage, and adding a size to it could wrap


@dataclass(frozen=True, slots=True)
class PairIndex:
    """A validated index. The arrays are read-only views of the mapped file, and each keeps the mapping alive.

    Attributes:
        path: the `.idx` file.
        dtype: of the tokens, little-endian.
        lengths: int32, shape (N,): tokens in each sequence.
        pointers: int64, shape (N,): byte offset of each sequence in the `.bin`.
        boundaries: int64, shape (documents + 1,): the sequence at which each document starts, then N.
        modes: int8, shape (N,), or None in a pair without modes. 0 is text.
        contiguous: whether the sequences stand back to back in the `.bin`, from its first byte to its last.

    """

    path: Path
    dtype: np.dtype[np.generic]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    modes: NDArray[np.int8] | None
    contiguous: bool

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents, the empty ones included."""
        return len(self.boundaries) - 1

    def document_of(self, sequence: int) -> int:
        """Return the document that a sequence belongs to."""
        return int(np.searchsorted(self.boundaries, sequence, side="right")) - 1

    def where(self, sequence: int) -> str:
        """Return the place of a sequence, for messages: both numbers count from 0."""
        return f"document {self.document_of(sequence)} (sequence {sequence})"


def map_bytes(path: Path) -> memoryview:
    """Return the bytes of a file, mapped; the mapping lives as long as any array made from them does."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")  # which cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_index(pair: PairPaths) -> PairIndex:
    """Map the index of a pair and check it, the size of the `.bin` included.

    Pointers other than those of sequences back to back are legal, and are followed with a warning.

    Raises:
        SourceError: the file is no index of version 1, is not whole, contradicts itself, or wants more tokens than
            the `.bin` has.

    """
    raw = map_bytes(pair.idx)
    dtype, num_sequences, num_boundaries = _read_header(pair.idx, raw)
    multimodal = _check_size(pair.idx, len(raw), num_sequences, num_boundaries)
    position = HEADER.size
    lengths = np.frombuffer(raw, LENGTH, num_sequences, position)
    position += lengths.nbytes
    pointers = np.frombuffer(raw, POINTER, num_sequences, position)
    position += pointers.nbytes
    boundaries = np.frombuffer(raw, BOUNDARY, num_boundaries, position)
    position += boundaries.nbytes
    modes = np.frombuffer(raw, MODE, num_sequences, position) if multimodal else None
    _check_lengths(pair.idx, lengths)
    _check_boundaries(pair.idx, boundaries, num_sequences)
    in_order, end = _walk_pointers(pair.idx, lengths, pointers, dtype.itemsize)
    index = PairIndex(pair.idx, dtype, lengths, pointers, boundaries, modes, in_order)
    _check_payload(pair.bin, index, end)
    return index


def _read_header(path: Path, raw: memoryview) -> tuple[np.dtype[np.generic], int, int]:
    if len(raw) < HEADER.size:
        raise SourceError(
            f"{path} has {len(raw)} bytes; a Megatron index has a header of {HEADER.size}: it is not whole"
        )
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise SourceError(f"{path} begins with {magic!r}; a Megatron index begins with {MAGIC!r}: it is another file")
    if version != VERSION:
        raise SourceError(f"{path} is of version {version}; only version {VERSION} of Megatron's index is known")
    if code not in DTYPES:
        known = ", ".join(f"{key} {dtype.name}" for key, dtype in DTYPES.items())
        raise SourceError(f"{path} has the dtype code {code}; expected one of {known}")
    return DTYPES[code], num_sequences, num_boundaries


def _check_size(path: Path, size: int, num_sequences: int, num_boundaries: int) -> bool:
    """Return whether the index holds modes: nothing says so but its size."""
    if num_boundaries < 1:
        raise SourceError(f"{path} has 0 document boundaries; expected at least 1, the number of documents plus one")
    text = index_size(num_sequences, num_boundaries, multimodal=False)
    if size in (text, text + num_sequences):
        return size > text
    counts = f"{num_sequences} sequences and {num_boundaries} document boundaries"
    if size < text:
        raise SourceError(
            f"{path} has {size} bytes, and {counts} need {text}: the last {text - size} bytes are missing, or the "
            "counts are damaged; copy the file again"
        )
    raise SourceError(
        f"{path} has {size} bytes, and {counts} need {text}, or {text + num_sequences} with modes: "
        "the counts are damaged, or something was appended"
    )


def _first(count: int, is_bad: Callable[[slice], NDArray[np.bool_]]) -> int | None:
    """Return the first of `count` entries that is bad, looked for block by block; None for none."""
    for start in range(0, count, _BLOCK):
        bad = np.flatnonzero(is_bad(slice(start, min(count, start + _BLOCK))))
        if len(bad):
            return start + int(bad[0])
    return None


def _check_lengths(path: Path, lengths: NDArray[np.int32]) -> None:
    sequence = _first(len(lengths), lambda block: lengths[block] < 0)
    if sequence is not None:
        raise SourceError(f"{path}: sequence {sequence} has the length {lengths[sequence]}; expected 0 or more")


def _check_boundaries(path: Path, boundaries: NDArray[np.int64], num_sequences: int) -> None:
    if boundaries[0] != 0:
        raise SourceError(f"{path}: the first document starts at sequence {boundaries[0]}; expected 0")
    if boundaries[-1] != num_sequences:
        raise SourceError(
            f"{path}: the last document boundary is {boundaries[-1]}; expected {num_sequences}, the number of "
            "sequences (was the last document never ended?)"
        )
    starts, ends = boundaries[:-1], boundaries[1:]
    document = _first(len(starts), lambda block: ends[block] < starts[block])
    if document is not None:
        raise SourceError(
            f"{path}: document {document} starts at sequence {starts[document]} and the next one at {ends[document]}; "
            "boundaries never decrease"
        )


def _walk_pointers(
    path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int
) -> tuple[bool, int]:
    """Return whether the sequences stand back to back from byte 0 on, and the byte at which the last of them ends."""
    sequence = _first(len(pointers), lambda block: (pointers[block] < 0) | (pointers[block] > _LAST_BYTE))
    if sequence is not None:
        raise SourceError(f"{path}: sequence {sequence} starts at byte {pointers[sequence]}, which no file has")
    back_to_back, running, last_end = True, 0, 0
    for start, tokens in _blocks(lengths):
        block = pointers[start : start + _BLOCK]
        sizes = tokens * itemsize
        ends = np.cumsum(sizes) + running  # int64: the sum of int32 lengths would wrap at 2^31
        back_to_back &= bool(np.array_equal(block, ends - sizes))
        running = int(ends[-1])
        last_end = max(last_end, int((block + sizes).max()))
    return back_to_back, last_end


def _blocks(lengths: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for start in range(0, len(lengths), _BLOCK):
        yield start, lengths[start : start + _BLOCK].astype(np.int64)


def _check_payload(path: Path, index: PairIndex, end: int) -> None:
    size = path.stat().st_size
    if size < end:
        item = index.dtype.itemsize
        short = _first(
            index.num_sequences,
            lambda block: size - index.pointers[block] < index.lengths[block].astype(np.int64) * item,
        )
        raise SourceError(
            f"{path} has {size} bytes, and its index needs {end}: the last {end - size} bytes are missing, from "
            f"{index.where(short or 0)} on; copy the file again"
        )
    if size > end and index.contiguous:
        raise SourceError(
            f"{path} has {size} bytes, and its index needs {end}: {size - end} bytes are in no sequence; "
            "the .idx and the .bin are not of one pair"
        )
    if not index.contiguous:
        logger.warning(
            "%s: the sequences do not stand back to back in the .bin; their pointers are followed", index.path
        )
