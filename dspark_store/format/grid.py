"""The arithmetic of samples, shards and chunks, and the generator of keys for samples. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_KIB = 1024
_STEP = 64
SPLITMIX64_GAMMA = 0x9E3779B97F4A7C15
"""What SplitMix64 adds to its state before each output."""


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words, uint64, in place: SplitMix64's output function, a bijection; returns them.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state ^= state >> 30
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> 27
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """How the samples of a column fall into shards, and the tokens of a sample into chunks.

    A shard is ``shard_size`` consecutive samples, the last one possibly fewer; a sample is ``chunks_per_row`` chunks
    of ``chunk_tokens`` positions. Chunks of a shard are numbered row-major ("slots"), as Zarr numbers them.
    """

    num_samples: int
    shard_size: int
    seq_length: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"num_samples must be >= 0, got {self.num_samples}")
        for name in ("shard_size", "seq_length", "chunk_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")

    @property
    def num_shards(self) -> int:
        """Shards in the store."""
        return -(-self.num_samples // self.shard_size)

    @property
    def chunks_per_row(self) -> int:
        """Chunks that a full-length sample has."""
        return -(-self.seq_length // self.chunk_tokens)

    @property
    def padded_length(self) -> int:
        """``seq_length`` rounded up to whole chunks: the shard's second axis."""
        return self.chunks_per_row * self.chunk_tokens

    @property
    def slots(self) -> int:
        """Chunks that a shard has room for."""
        return self.shard_size * self.chunks_per_row

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (shard, row in the shard) of a sample."""
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} is outside the store's {self.num_samples} samples")
        return divmod(sample, self.shard_size)

    def rows(self, shard: int) -> range:
        """Return the samples of a shard."""
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} is outside the store's {self.num_shards} shards")
        first = shard * self.shard_size
        return range(first, min(first + self.shard_size, self.num_samples))

    def chunks_of(self, length: int) -> int:
        """Return how many chunks a sample of ``length`` tokens stores."""
        return -(-min(length, self.seq_length) // self.chunk_tokens)


def default_chunk_tokens(hidden_size: int, itemsize: int, seq_length: int, *, compressed: bool) -> int:
    """Choose the tokens a chunk for a state column of ``hidden_size`` features of ``itemsize`` bytes.

    Compressed chunks want 512 KiB to 2 MiB in whole 256 KiB, so that they fill zstd's blocks; where no multiple of 64
    tokens gives that, the one nearest to 1.25 MiB. Uncompressed tails are stored whole, so those chunks are small.
    """
    token_bytes = hidden_size * itemsize
    if not compressed:
        tokens = _STEP if _STEP * token_bytes >= 256 * _KIB else 2 * _STEP
        return min(tokens, seq_length)
    for tokens in range(_STEP, 2048 * _KIB // token_bytes + 1, _STEP):
        size = tokens * token_bytes
        if size >= 512 * _KIB and size % (256 * _KIB) == 0:
            return min(tokens, seq_length)
    nearest = max(1, round(1280 * _KIB / (token_bytes * _STEP)))
    return min(nearest * _STEP, seq_length)
