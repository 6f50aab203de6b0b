"""A pair `<prefix>.idx` and `<prefix>.bin` as Megatron-LM writes it: checked whole, and read as one stream of tokens.

The index is packed and little-endian: magic (9 bytes), version (u64), dtype code (u8), number of sequences N (u64),
number of document boundaries B = documents + 1 (u64), then i32[N] tokens per sequence, i64[N] byte offsets into the
`.bin`, i64[B] boundaries (the sequence that each document starts with, and N at the end), and, in multimodal pairs
only, i8[N] modes. The `.bin` holds the sequences back to back.
"""

import hashlib
import logging
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.source import SourceError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LENGTH, OFFSET, MODE = np.dtype("<i4"), np.dtype("<i8"), np.dtype("i1")
TEXT_MODE = 0

DTYPES: Mapping[int, np.dtype[np.generic]] = MappingProxyType(
    {code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)}
)
"""dtype code in the header -> dtype of the `.bin`. There is no code for uint32."""

SMALLEST_INT32_VOCABULARY = 65500
"""Megatron-LM's writer keeps smaller vocabularies as uint16, and the others as int32."""

_BLOCK = 1 << 20  # entries checked at a time, so that validation needs no second copy of a large index
_LAST_BYTE = 1 << 62  # a pointer past it is damage, and adding a size to it could wrap

logger = logging.getLogger(__name__)


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


def pair_files(prefix: Path) -> tuple[Path, Path]:
    """Return the paths of the `.idx` and the `.bin` of a pair."""
    return prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")


@dataclass(frozen=True, slots=True)
class IndexedPair:
    """An open pair. Arrays of it are read-only views of the mapped files, and outlive it safely.

    The *stream* is the tokens of all text sequences, in the order of the index, without the image sequences of a
    multimodal pair.

    Attributes:
        prefix: of both files.
        dtype: of the tokens, little-endian.
        lengths: int32, shape (N,): tokens in each sequence.
        pointers: int64, shape (N,): byte offset of each sequence in the `.bin`.
        boundaries: int64, shape (documents + 1,): the sequence at which each document starts, then N.
        modes: int8, shape (N,), or None in a pair without modes. 0 is text.
        contiguous: whether the sequences stand back to back in the `.bin`, from its first byte to its last.
        starts: int64, shape (N + 1,): the position in the stream at which each sequence starts, and its length.
            An image sequence takes no place in it.
        payload: the bytes of the `.bin`, mapped.

    """

    prefix: Path
    dtype: np.dtype[np.generic]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    modes: NDArray[np.int8] | None
    contiguous: bool
    starts: NDArray[np.int64]
    payload: memoryview = field(repr=False)
    _versions: list[tuple[int, ...]] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.starts[-1])

    def document_starts(self) -> NDArray[np.int64]:
        """Return int64, shape (documents + 1,): the position in the stream at which each document starts."""
        return self.starts[self.boundaries]

    def sequence(self, number: int) -> NDArray[np.generic]:
        """Return the values of one sequence, whatever its mode, in the dtype of the pair."""
        return self._values(int(self.pointers[number]), int(self.lengths[number]))

    def stream(self, start: int, stop: int) -> NDArray[np.generic]:
        """Return the tokens of the stream from position `start` up to `stop`: a view where they stand together.

        Raises:
            ValueError: the span is not in the stream.

        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"span {start}:{stop} of {self.prefix}; expected one in 0:{self.num_tokens}")
        if self.contiguous and self.num_tokens * self.dtype.itemsize == len(self.payload):  # no images
            return self._values(start * self.dtype.itemsize, stop - start)
        parts = [np.empty(0, self.dtype)]
        sequence = self._sequence_at(start)
        while start < stop:
            offset = start - int(self.starts[sequence])
            taken = min(stop, int(self.starts[sequence + 1])) - start
            if taken:
                parts.append(self.sequence(sequence)[offset : offset + taken])
            start, sequence = start + taken, sequence + 1
        return np.concatenate(parts)

    def where(self, position: int) -> str:
        """Return the place of a token of the stream, for messages: all numbers count from 0."""
        sequence = self._sequence_at(position)
        return f"{pair_files(self.prefix)[1]}: token {position - int(self.starts[sequence])} of " + _sequence_name(
            self.boundaries, sequence
        )

    def require_unchanged(self) -> None:
        """Raise SourceError if either file is no longer the one that was opened."""
        if _file_versions(self.prefix) != self._versions:
            raise SourceError(f"{self.prefix}: its .idx or .bin was changed while it was in use; start again")

    def sha256(self) -> dict[str, str]:
        """Return the SHA-256 of both files, in hex; reads them through.

        Raises:
            SourceError: a file was changed since it was opened.

        """
        digests = {}
        for path in pair_files(self.prefix):
            with path.open("rb") as file:
                digests[f"{path.suffix[1:]}_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        self.require_unchanged()
        return digests

    def _sequence_at(self, position: int) -> int:
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def _values(self, offset: int, count: int) -> NDArray[np.generic]:
        return np.frombuffer(self.payload, self.dtype, count, offset) if count else np.empty(0, self.dtype)


def open_pair(path: str | PathLike[str], *, skip_images: bool = False) -> IndexedPair:
    """Open a pair and check every count and size in it.

    Pointers other than those of sequences back to back are legal, and are followed with a warning.

    Args:
        path: the prefix, or either of the files.
        skip_images: leave the image sequences of a multimodal pair out of the stream, instead of refusing the pair.

    Raises:
        FileNotFoundError: one of the files is not there.
        SourceError: the index is of no known version, is not whole, contradicts itself, or wants more tokens than the
            `.bin` has; or the pair holds images and `skip_images` is false.

    """
    prefix = _prefix_of(path)
    idx, payload_path = pair_files(prefix)
    versions = _file_versions(prefix)
    raw, payload = _map_bytes(idx), _map_bytes(payload_path)
    dtype, count, num_boundaries = _read_header(idx, raw)
    multimodal = _check_size(idx, len(raw), count, num_boundaries)
    place = HEADER.size
    arrays: list[NDArray[Any]] = []
    for kind, entries in ((LENGTH, count), (OFFSET, count), (OFFSET, num_boundaries), (MODE, count * multimodal)):
        arrays.append(np.frombuffer(raw, kind, entries, place))
        place += arrays[-1].nbytes
    lengths, pointers, boundaries, modes = arrays
    _check_numbers(idx, lengths, pointers, boundaries)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])  # int64: the sum of int32 lengths would wrap at 2^31
    contiguous = _first(count, lambda block: pointers[block] != starts[:-1][block] * dtype.itemsize) is None
    _check_payload(payload_path, len(payload), lengths, pointers, boundaries, dtype.itemsize, contiguous=contiguous)
    images = modes != TEXT_MODE
    if images.any():
        if not skip_images:
            first = int(np.flatnonzero(images)[0])
            raise SourceError(
                f"{idx}: {_sequence_name(boundaries, first)} has the mode {modes[first]}, and so have "
                f"{int(images.sum())} of {count} sequences: they hold images, not tokens; skip_images leaves them out"
            )
        np.cumsum(np.where(images, 0, lengths), dtype=np.int64, out=starts[1:])
    known_modes = modes if multimodal else None
    return IndexedPair(prefix, dtype, lengths, pointers, boundaries, known_modes, contiguous, starts, payload, versions)


def _prefix_of(path: str | PathLike[str]) -> Path:
    prefix = given = Path(fspath(path))
    if not pair_files(prefix)[0].exists() and given.suffix in (".bin", ".idx"):  # a prefix may itself end in .bin
        prefix = given.with_suffix("")
    missing = [file for file in pair_files(prefix) if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{missing[0]}: no such file; a Megatron pair is PREFIX.idx and PREFIX.bin, and the path given is its "
            f"prefix or either file (given: {given})"
        )
    return prefix


def _map_bytes(path: Path) -> memoryview:
    """Return the bytes of a file, mapped; the mapping lives as long as any array made from them does."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")  # which cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _file_versions(prefix: Path) -> list[tuple[int, ...]]:
    """Return inode, size and time of both files, where they are there."""
    statuses = [path.stat() for path in pair_files(prefix) if path.exists()]
    return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses]


def _read_header(path: Path, raw: memoryview) -> tuple[np.dtype[np.generic], int, int]:
    """Return the dtype, the number of sequences and that of document boundaries."""
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
    if num_boundaries < 1:
        raise SourceError(f"{path} has 0 document boundaries; expected at least 1, the number of documents plus one")
    return DTYPES[code], num_sequences, num_boundaries


def _check_size(path: Path, size: int, num_sequences: int, num_boundaries: int) -> bool:
    """Return whether the index holds modes: nothing says so but its size."""
    text = HEADER.size + num_sequences * (LENGTH.itemsize + OFFSET.itemsize) + num_boundaries * OFFSET.itemsize
    if size in (text, text + num_sequences):
        return size > text
    counts = f"{path} has {size} bytes, and {num_sequences} sequences and {num_boundaries} document boundaries need"
    if size < text:
        raise SourceError(
            f"{counts} {text}: the last {text - size} bytes are missing, or the counts are damaged; copy the file again"
        )
    raise SourceError(
        f"{counts} {text}, or {text + num_sequences} with modes: the counts are damaged, or something was appended"
    )


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(count, start + _BLOCK)) for start in range(0, count, _BLOCK))


def _first(count: int, is_bad: Callable[[slice], NDArray[np.bool_]]) -> int | None:
    """Return the first of `count` entries that is bad, looked for block by block; None for none."""
    found = ((block.start, np.flatnonzero(is_bad(block))) for block in _blocks(count))
    return next((int(start + bad[0]) for start, bad in found if len(bad)), None)


def _check_numbers(
    path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], boundaries: NDArray[np.int64]
) -> None:
    """Raise SourceError for numbers that no index has, whatever its `.bin`."""
    bad = _first(len(lengths), lambda block: lengths[block] < 0)
    if bad is not None:
        raise SourceError(f"{path}: sequence {bad} has the length {lengths[bad]}; expected 0 or more")
    if boundaries[0] != 0:
        raise SourceError(f"{path}: the first document starts at sequence {boundaries[0]}; expected 0")
    if boundaries[-1] != len(lengths):
        raise SourceError(
            f"{path}: the last document boundary is {boundaries[-1]}; expected {len(lengths)}, the number of "
            "sequences (was the last document never ended?)"
        )
    starts, ends = boundaries[:-1], boundaries[1:]
    bad = _first(len(starts), lambda block: ends[block] < starts[block])
    if bad is not None:
        raise SourceError(
            f"{path}: document {bad} starts at sequence {starts[bad]} and the next one at {ends[bad]}; "
            "boundaries never decrease"
        )
    bad = _first(len(pointers), lambda block: (pointers[block] < 0) | (pointers[block] > _LAST_BYTE))
    if bad is not None:
        raise SourceError(f"{path}: sequence {bad} starts at byte {pointers[bad]}, which no file has")


def _check_payload(
    path: Path,
    size: int,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    boundaries: NDArray[np.int64],
    itemsize: int,
    *,
    contiguous: bool,
) -> None:
    """Raise SourceError unless the `.bin` has what the index names, and, of sequences back to back, no more."""

    def ends(block: slice) -> NDArray[np.int64]:
        return pointers[block] + lengths[block].astype(np.int64) * itemsize

    needed = max((int(ends(block).max()) for block in _blocks(len(lengths))), default=0)
    if size < needed:
        short = _first(len(lengths), lambda block: ends(block) > size)
        raise SourceError(
            f"{path} has {size} bytes, and its index needs {needed}: the last {needed - size} bytes are missing, from "
            f"{_sequence_name(boundaries, short or 0)} on; copy the file again"
        )
    if not contiguous:
        logger.warning("%s: the sequences do not stand back to back; their pointers are followed", path)
    elif size > needed:
        raise SourceError(
            f"{path} has {size} bytes, and its index needs {needed}: {size - needed} bytes are in no sequence; "
            "the .idx and the .bin are not of one pair"
        )


def _sequence_name(boundaries: NDArray[np.int64], sequence: int) -> str:
    document = int(np.searchsorted(boundaries, sequence, side="right")) - 1
    return f"document {document} (sequence {sequence})"
