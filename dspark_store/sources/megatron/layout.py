"""The bytes of an indexed pair `<prefix>.idx` and `<prefix>.bin`, as Megatron-LM writes them.

The index is packed and little-endian: magic (9 bytes), version (u64), dtype code (u8), number of sequences N (u64),
number of document boundaries B = documents + 1 (u64), then i32[N] tokens a sequence, i64[N] byte offsets into the
`.bin`, i64[B] boundaries (the sequence that each document starts with, and N at the end), and, in multimodal pairs
only, i8[N] modes. The `.bin` holds the sequences back to back.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType

import numpy as np

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
