"""Writing a pair: sequence by sequence, and in the end both files or neither."""

from array import array
from collections.abc import Buffer, Iterable, Sequence
from contextlib import nullcontext
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dspark_store.format.files import LocalObjectWriter
from dspark_store.sources.megatron.pair import (
    HEADER,
    LENGTH,
    MAGIC,
    MODE,
    OFFSET,
    TEXT_MODE,
    VERSION,
    dtype_code,
    dtype_for_vocabulary,
    open_pair,
    pair_files,
)
from dspark_store.sources.source import Sample

_BLOCK = 1 << 20  # bytes of a payload that are copied at a time
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
        self._prefix = Path(fspath(prefix))
        self._idx, self._bin = pair_files(self._prefix)
        for path in (self._bin, self._idx):
            if path.exists():
                raise FileExistsError(f"{path} exists; remove it or choose another prefix")
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._payload: LocalObjectWriter | None = LocalObjectWriter(self._bin.parent, self._bin.name)

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
        if other.dtype != self._dtype:
            raise ValueError(
                f"{other.prefix}.idx holds {other.dtype.name}, and this pair {self._dtype.name}; "
                "merge pairs of one dtype"
            )
        if other.modes is not None and self._modes is None:
            raise ValueError(f"{other.prefix}.idx has modes, and this pair keeps none; build it with multimodal=True")
        if other.contiguous:
            _write_all(self._file(), *(other.payload[at : at + _BLOCK] for at in range(0, len(other.payload), _BLOCK)))
        else:
            _write_all(self._file(), *map(other.sequence, range(len(other.lengths))))
        first = len(self._lengths)
        self._lengths.frombytes(other.lengths.astype(np.intc).tobytes())
        self._boundaries.frombytes((other.boundaries[1:] + first).astype(np.int64).tobytes())
        if self._modes is not None:
            modes = np.zeros(len(other.lengths), np.int8) if other.modes is None else other.modes
            self._modes.frombytes(modes.tobytes())

    def finish(self) -> None:
        """Write the index and give both files their names.

        Raises:
            ValueError: the last document was not ended.
            FileExistsError: a file of the pair appeared meanwhile.

        """
        self._require_ended("finish")
        payload = self._file()
        index = LocalObjectWriter(self._idx.parent, self._idx.name)
        try:
            self._write_index(index)
            for path in (self._bin, self._idx):
                if path.exists():
                    raise FileExistsError(f"{path} appeared while the pair was built; it was left as it is")
            payload.commit_new()
            index.commit_new()
        finally:
            index.abort()
            self.discard()

    def discard(self) -> None:
        """Remove what was written; a pair that was finished stays."""
        if self._payload is not None:
            self._payload.abort()
            self._payload = None

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
            bad = int(np.flatnonzero((values < limits.min) | (values > limits.max))[0])
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
        _write_all(self._file(), values)
        self._lengths.extend(lengths)
        if self._modes is not None:
            self._modes.extend(modes)

    def _file(self) -> LocalObjectWriter:
        if self._payload is None:
            raise ValueError(f"{self._prefix}: the pair is finished or discarded; nothing can be added")
        return self._payload

    def _require_ended(self, doing: str) -> None:
        self._file()
        loose = len(self._lengths) - self._boundaries[-1]
        if loose:
            raise ValueError(
                f"{self._prefix}: the last {loose} sequences are in no document; call end_document before {doing}"
            )

    def _write_index(self, file: LocalObjectWriter) -> None:
        lengths = np.frombuffer(self._lengths, np.intc)
        pointers = np.zeros(len(lengths) + 1, OFFSET)
        np.cumsum(lengths, dtype=OFFSET, out=pointers[1:])
        pointers *= self._dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._boundaries))
        boundaries = np.frombuffer(self._boundaries, np.int64).astype(OFFSET, copy=False)
        modes = self._modes or array("b")
        _write_all(file, header, lengths.astype(LENGTH, copy=False), pointers[:-1], boundaries, modes)


def _write_all(file: LocalObjectWriter, *parts: Buffer) -> None:
    for part in parts:
        if memoryview(part):
            file.write(part)


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
