"""An indexed pair as one stream of text tokens, and its sequences and documents as spans of that stream."""

import hashlib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.megatron.pair_index import TEXT_MODE, PairIndex, PairPaths, find_pair, map_bytes, read_index
from dspark_store.sources.source import SourceError

type FileVersion = tuple[int, int, int]  # inode, size and mtime in ns


@dataclass(frozen=True, slots=True)
class IndexedPair:
    """An open pair. Arrays of it are read-only views of the mapped files, and outlive it safely.

    The *stream* is the tokens of all text sequences, in the order of the index, without the image sequences of a
    multimodal pair.

    Attributes:
        paths: the two files.
        index: the validated index.
        starts: int64, shape (N + 1,): the position in the stream at which each sequence starts, and its length.
            An image sequence takes no place in it.

    """

    paths: PairPaths
    index: PairIndex
    starts: NDArray[np.int64]
    _payload: memoryview = field(repr=False)
    _version: tuple[FileVersion, FileVersion] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.starts[-1])

    def document_starts(self) -> NDArray[np.int64]:
        """Return int64, shape (documents + 1,): the position in the stream at which each document starts."""
        return self.starts[self.index.boundaries]

    def sequence(self, number: int) -> NDArray[np.generic]:
        """Return the values of one sequence, whatever its mode, in the dtype of the pair.

        Raises:
            IndexError: there is no such sequence; negative numbers count from the end.

        """
        number = self._counted("sequence", number, self.index.num_sequences)
        return self._values(int(self.index.pointers[number]), int(self.index.lengths[number]))

    def document(self, number: int) -> NDArray[np.generic]:
        """Return the text tokens of one document, its sequences joined, in the dtype of the pair.

        Raises:
            IndexError: there is no such document; negative numbers count from the end.

        """
        number = self._counted("document", number, self.index.num_documents)
        first, last = self.index.boundaries[number], self.index.boundaries[number + 1]
        return self.stream(int(self.starts[first]), int(self.starts[last]))

    def stream(self, start: int, stop: int) -> NDArray[np.generic]:
        """Return the tokens of the stream from position `start` up to `stop`: a view where they stand together.

        Raises:
            ValueError: the span is not in the stream.

        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"span {start}:{stop} of {self.paths.bin}; expected one in 0:{self.num_tokens}")
        if self.index.contiguous and self.num_tokens * self.index.dtype.itemsize == len(self._payload):  # no images
            return self._values(start * self.index.dtype.itemsize, stop - start)
        parts = []
        sequence = self.sequence_at(start)
        while start < stop:
            offset = start - int(self.starts[sequence])
            taken = min(stop, int(self.starts[sequence + 1])) - start
            if taken:
                parts.append(self.sequence(sequence)[offset : offset + taken])
            start, sequence = start + taken, sequence + 1
        return np.concatenate(parts) if parts else np.empty(0, self.index.dtype)

    def sequence_at(self, position: int) -> int:
        """Return the sequence that holds a position of the stream."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def payload(self) -> memoryview:
        """Return the bytes of the `.bin`, mapped."""
        return self._payload

    def require_unchanged(self) -> None:
        """Raise SourceError if either file is no longer the one that was opened."""
        if _versions(self.paths) != self._version:
            raise SourceError(f"{self.paths.prefix}: its .idx or .bin was changed while it was in use; start again")

    def sha256(self) -> dict[str, str]:
        """Return the SHA-256 of both files, in hex; reads them through.

        Raises:
            SourceError: a file was changed since it was opened.

        """
        digests = {"idx_sha256": _file_sha256(self.paths.idx), "bin_sha256": _file_sha256(self.paths.bin)}
        self.require_unchanged()
        return digests

    def _counted(self, kind: str, number: int, count: int) -> int:
        """Return a number of `count`, negative ones counted from the end."""
        if not -count <= number < count:
            raise IndexError(f"{kind} {number} of {self.paths.idx}; expected {-count} to {count - 1}")
        return number % count

    def _values(self, offset: int, count: int) -> NDArray[np.generic]:
        if not count:
            return np.empty(0, self.index.dtype)
        return np.frombuffer(self._payload, self.index.dtype, count, offset)


def open_pair(path: str | PathLike[str], *, skip_images: bool = False) -> IndexedPair:
    """Open a pair and check every count and size in it.

    Args:
        path: the prefix, or either of the files.
        skip_images: leave the image sequences of a multimodal pair out of the stream, instead of refusing the pair.

    Raises:
        FileNotFoundError: one of the files is not there.
        SourceError: the pair is damaged, or holds images and `skip_images` is false.

    """
    paths = find_pair(path)
    version = _versions(paths)
    index = read_index(paths)
    text_lengths = index.lengths
    if index.modes is not None:
        images = index.modes != TEXT_MODE
        if images.any() and not skip_images:
            first = int(np.flatnonzero(images)[0])
            raise SourceError(
                f"{index.path}: {index.where(first)} has the mode {index.modes[first]}, and so have "
                f"{int(images.sum())} of {index.num_sequences} sequences: they hold images, not tokens; "
                "skip_images leaves them out"
            )
        text_lengths = np.where(images, 0, text_lengths)
    starts = np.zeros(index.num_sequences + 1, np.int64)
    np.cumsum(text_lengths, dtype=np.int64, out=starts[1:])
    return IndexedPair(paths, index, starts, map_bytes(paths.bin), version)


def _versions(paths: PairPaths) -> tuple[FileVersion, FileVersion]:
    return _version(paths.idx), _version(paths.bin)


def _version(path: Path) -> FileVersion:
    try:
        status = path.stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
