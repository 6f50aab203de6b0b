"""Writing a pair: sequence by sequence, and in the end both files or neither."""

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dspark_store.format.files import sync_path
from dspark_store.sources.megatron.pair import IndexedPair, open_pair
from dspark_store.sources.megatron.pair_index import (
    BOUNDARY,
    HEADER,
    LENGTH,
    MAGIC,
    MODE,
    POINTER,
    TEXT_MODE,
    VERSION,
    PairPaths,
    dtype_code,
    dtype_for_vocabulary,
)
from dspark_store.sources.source import Sample

_BLOCK = 1 << 20  # entries of the index, or bytes of a payload, written at a time
_LONGEST = np.iinfo(np.int32).max


class PairBuilder:
    """Builds `<prefix>.bin` and `<prefix>.idx`.

    Used in a `with` block, it finishes at the end of the block, and leaves nothing behind if the block raises. Both
    files are written under other names until then, and the index gets its name last, so that whoever finds an index
    has the whole pair. Memory is 12 bytes per sequence and 8 per document.
    """

    def __init__(self, prefix: str | PathLike[str], *, dtype: DTypeLike = np.int32, multimodal: bool = False) -> None:
        """Begin a pair.

        Args:
            prefix: path of the pair without its suffixes. Missing directories are made.
            dtype: of the tokens, one of the integer dtypes of the format. See `dtype_for_vocabulary`.
            multimodal: keep a mode for each sequence.

        Raises:
            FileExistsError: either file is there.
            ValueError: the format has no code for the dtype, or it is a float's.

        """
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = dtype_code(self._dtype)
        if self._dtype.kind == "f":
            raise ValueError(f"dtype {self._dtype.name} holds no token ids; expected an integer dtype")
        self.paths = PairPaths(Path(fspath(prefix)))
        for path in (self.paths.bin, self.paths.idx):
            if path.exists():
                raise FileExistsError(f"{path} exists; remove it or choose another prefix")
        directory = self.paths.prefix.parent
        directory.mkdir(parents=True, exist_ok=True)
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._work_bin = _work_file(self.paths.bin)
        self._payload: BinaryIO | None = self._work_bin.open("wb")

    def add_item(self, tokens: ArrayLike, mode: int = TEXT_MODE) -> None:
        """Append one sequence to the document that is being built.

        Args:
            tokens: integers, shape (length,); none is legal.
            mode: of the sequence; other than 0 in a multimodal pair only.

        Raises:
            ValueError: the tokens are not one row of integers that the dtype holds, or the mode is none for this pair.

        """
        values = self._checked(tokens)
        self._write(values, [len(values)], [mode])

    def end_document(self) -> None:
        """End the document that is being built. A document may have no sequence."""
        self._file()
        self._boundaries.append(len(self._lengths))

    def add_document(
        self, tokens: ArrayLike, lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Append one whole document.

        Args:
            tokens: integers, shape (length,): its sequences, joined.
            lengths: of its sequences; None: the document is one sequence.
            modes: of its sequences; None: all text.

        Raises:
            ValueError: as `add_item`; or the lengths do not add up, or there is a sequence of a document that was not
                ended. Nothing is appended then.

        """
        self._require_ended("add_document")
        values = self._checked(tokens)
        lengths = [len(values)] if lengths is None else lengths
        modes = [TEXT_MODE] * len(lengths) if modes is None else modes
        if min(lengths, default=0) < 0 or sum(lengths) != len(values):
            raise ValueError(f"the lengths {list(lengths)} do not add up to the {len(values)} tokens of the document")
        if len(modes) != len(lengths):
            raise ValueError(f"{len(modes)} modes for {len(lengths)} sequences; expected one each")
        self._write(values, lengths, modes)
        self.end_document()

    def add_pair(self, path: str | PathLike[str]) -> None:
        """Append all documents of another pair.

        Raises:
            FileNotFoundError: one of its files is not there.
            SourceError: it is damaged.
            ValueError: it is of another dtype, or has modes and this one has not; or there is a sequence of a
                document that was not ended.

        """
        self._require_ended("add_pair")
        other = open_pair(path, skip_images=True)
        index = other.index
        if index.dtype != self._dtype:
            raise ValueError(
                f"{index.path} holds {index.dtype.name}, and this pair {self._dtype.name}; merge pairs of one dtype"
            )
        if index.modes is not None and self._modes is None:
            raise ValueError(f"{index.path} has modes, and this pair keeps none; build it with multimodal=True")
        for block in _payload_of(other):
            self._file().write(block)
        first = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(index.lengths, np.intc).tobytes())
        self._boundaries.frombytes((index.boundaries[1:].astype(np.int64) + first).tobytes())
        if self._modes is not None:
            modes = np.zeros(index.num_sequences, np.int8) if index.modes is None else index.modes
            self._modes.frombytes(modes.tobytes())

    def finish(self) -> None:
        """Write the index and give both files their names.

        Raises:
            ValueError: the last document was not ended.
            FileExistsError: a file of the pair appeared meanwhile.

        """
        self._require_ended("finish")
        payload = self._file()
        work_idx = _work_file(self.paths.idx)
        try:
            with work_idx.open("wb") as file:
                for block in self._index_blocks():
                    file.write(block)
                _sync(file)
            _sync(payload)
            payload.close()
            self._payload = None
            for path in (self.paths.bin, self.paths.idx):
                if path.exists():
                    raise FileExistsError(f"{path} appeared while the pair was built; it was left as it is")
            self._work_bin.rename(self.paths.bin)
            work_idx.rename(self.paths.idx)
            sync_path(self.paths.prefix.parent)
        finally:
            work_idx.unlink(missing_ok=True)
            self._work_bin.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was written; a pair that was finished stays."""
        if self._payload is not None:
            self._payload.close()
            self._payload = None
            self._work_bin.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Return the builder."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish, or discard if the block raised."""
        try:
            if kind is None and self._payload is not None:
                self.finish()
        finally:
            self.discard()

    def _checked(self, tokens: ArrayLike) -> NDArray[np.integer]:
        """Return the tokens in the dtype of the pair; ValueError if that would change one of them."""
        values = np.asarray(tokens)
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise ValueError(f"tokens of shape {values.shape} and dtype {values.dtype}; expected one row of integers")
        if len(values) > _LONGEST:
            raise ValueError(f"a sequence of {len(values)} tokens; the format counts up to {_LONGEST}")
        limits = np.iinfo(self._dtype)
        if values.size and (int(values.min()) < limits.min or int(values.max()) > limits.max):
            bad = next(index for index, value in enumerate(values.tolist()) if not limits.min <= value <= limits.max)
            raise ValueError(
                f"token {bad} is {values[bad]}, and {self._dtype.name} holds {limits.min} to {limits.max}; "
                "choose a wider dtype for the pair"
            )
        return np.ascontiguousarray(values, self._dtype)

    def _write(self, values: NDArray[np.integer], lengths: Sequence[int], modes: Sequence[int]) -> None:
        limits = np.iinfo(MODE)
        for mode in modes:
            if mode != TEXT_MODE and self._modes is None:
                raise ValueError(f"mode {mode} in a pair that keeps none; build it with multimodal=True")
            if not limits.min <= mode <= limits.max:
                raise ValueError(f"mode {mode}; expected {limits.min} to {limits.max}")
        self._file().write(memoryview(values))
        self._lengths.extend(lengths)
        if self._modes is not None:
            self._modes.extend(modes)

    def _file(self) -> BinaryIO:
        if self._payload is None:
            raise ValueError(f"{self.paths.prefix}: the pair is finished or discarded; nothing can be added")
        return self._payload

    def _require_ended(self, doing: str) -> None:
        self._file()
        loose = len(self._lengths) - self._boundaries[-1]
        if loose:
            raise ValueError(
                f"{self.paths.prefix}: the last {loose} sequences are in no document; call end_document before {doing}"
            )

    def _index_blocks(self) -> Iterator[bytes]:
        yield HEADER.pack(MAGIC, VERSION, self._code, len(self._lengths), len(self._boundaries))
        lengths = np.frombuffer(self._lengths, np.intc)
        yield from _in_blocks(lengths, LENGTH)
        pointer = 0
        for start in range(0, len(lengths), _BLOCK):
            sizes = lengths[start : start + _BLOCK].astype(np.int64) * self._dtype.itemsize
            ends = np.cumsum(sizes) + pointer
            yield (ends - sizes).astype(POINTER).tobytes()
            pointer = int(ends[-1])
        yield from _in_blocks(np.frombuffer(self._boundaries, np.int64), BOUNDARY)
        if self._modes is not None:
            yield self._modes.tobytes()


def _in_blocks(values: NDArray[np.integer], dtype: np.dtype[np.generic]) -> Iterator[bytes]:
    for start in range(0, len(values), _BLOCK):
        yield values[start : start + _BLOCK].astype(dtype).tobytes()


def _payload_of(pair: IndexedPair) -> Iterator[memoryview]:
    """Yield the bytes of all sequences of a pair, in the order of its index."""
    if pair.index.contiguous:
        whole = pair.payload()
        for start in range(0, len(whole), _BLOCK):
            yield whole[start : start + _BLOCK]
    else:
        for sequence in range(pair.index.num_sequences):
            yield memoryview(pair.sequence(sequence)).cast("B")


def _work_file(path: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.fchmod(descriptor, 0o644)
    os.close(descriptor)
    return Path(name)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_samples(
    samples: Iterable[Sample],
    prefix: str | PathLike[str],
    *,
    mask_prefix: str | PathLike[str] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write a pair of one document of one sequence a sample.

    Args:
        samples: read once, in order.
        prefix: of the pair of ids. Its dtype is the one that Megatron-LM picks for the vocabulary.
        mask_prefix: of a second pair, uint8, for the option `loss_mask` of the source; None: no masks are written.
        vocab_size: ids are below it; None: not known.

    Raises:
        FileExistsError: a file of a pair is there.
        ValueError: an id does not fit into the dtype.

    """
    with (
        nullcontext() if mask_prefix is None else PairBuilder(mask_prefix, dtype=np.uint8) as masks,
        PairBuilder(prefix, dtype=dtype_for_vocabulary(vocab_size)) as ids,
    ):
        for sample in samples:
            ids.add_document(sample.input_ids)
            if masks is not None:
                masks.add_document(sample.loss_mask)
