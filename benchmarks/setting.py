"""The settings that a store's chunks have, and the grid of them that is measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.samples import Samples
from dspark_store.format.codecs import CODEC_PRESETS
from dspark_store.format.grid import default_chunk_tokens

DEFAULT_SHARD_SIZE = 256
"""The default of ``--shard-size``."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """How states are cut and encoded: the codec preset, T tokens and L layers a chunk, R samples a shard."""

    codec: str
    chunk_tokens: int
    shard_size: int
    layers: int = 1

    def __str__(self) -> str:
        layers = "" if self.layers == 1 else f", {self.layers} layers a chunk"
        return f"{self.codec}, T={self.chunk_tokens}, R={self.shard_size}{layers}"

    @property
    def flags(self) -> str:
        """The flags of the precompute. It keeps one layer a chunk; ValueError for any other number."""
        if self.layers != 1:
            raise ValueError(f"the precompute keeps one layer a chunk, not {self.layers}")
        return f"--codec {self.codec} --chunk-tokens {self.chunk_tokens} --shard-size {self.shard_size}"


@dataclass(frozen=True, slots=True)
class Axes:
    """The values of each axis, ascending; codecs in the order of the presets."""

    codecs: tuple[str, ...]
    chunk_tokens: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    layers: tuple[int, ...]

    def settings(self, *, layers: int | None = None) -> list[Setting]:
        """Return every combination, or those with ``layers`` layers a chunk."""
        wanted = self.layers if layers is None else (layers,)
        return [Setting(*axes) for axes in product(self.codecs, self.chunk_tokens, self.shard_sizes, wanted)]


def default_setting(samples: Samples, codec: str = "default") -> Setting:
    """Return what the precompute takes for these samples when nothing is said."""
    tokens = default_chunk_tokens(samples.width, samples.dtype.itemsize, samples.seq_length, compressed=codec != "none")
    return Setting(codec, tokens, DEFAULT_SHARD_SIZE)


def default_axes(samples: Samples, *, quick: bool) -> Axes:
    """Return the axes of a sweep: T doubles up to S, with the defaults of the precompute on every axis.

    Codec dense is left out where its package is not installed, and of a quick sweep.
    """
    tokens = {1 << power for power in range(4 if samples.seq_length < 64 else 5, 12) if 1 << power < samples.seq_length}
    tokens = {value for value in tokens if value in (64, 256)} if quick and samples.seq_length > 64 else tokens
    tokens |= {default_setting(samples, codec).chunk_tokens for codec in ("none", "default")}
    dense = importlib.util.find_spec("pcodec") is not None and not quick
    codecs = tuple(codec for codec in CODEC_PRESETS if codec != "dense" or dense)
    shards = (16, DEFAULT_SHARD_SIZE) if quick else (16, 64, DEFAULT_SHARD_SIZE)
    return Axes(codecs, tuple(sorted(tokens)), shards, tuple(sorted({1, samples.layers})))


def chosen_axes(axes: Axes, given: Axes, samples: Samples) -> Axes:
    """Return the axes with those of ``given`` that are not empty in their place.

    ValueError when a value cannot be: T above S, or layers a chunk that do not divide K.
    """

    def pick[T](wanted: Sequence[T], default: Sequence[T]) -> tuple[T, ...]:
        return tuple(wanted or default)

    chosen = Axes(
        pick(given.codecs, axes.codecs),
        pick(sorted(given.chunk_tokens), axes.chunk_tokens),
        pick(sorted(given.shard_sizes), axes.shard_sizes),
        pick(sorted(given.layers), axes.layers),
    )
    for tokens in chosen.chunk_tokens:
        if not 1 <= tokens <= samples.seq_length:
            raise ValueError(f"--chunk-tokens {tokens} is outside 1 to {samples.seq_length}, the positions of a sample")
    for layers in chosen.layers:
        if layers < 1 or samples.layers % layers:
            raise ValueError(f"--layers-per-chunk {layers} does not divide the {samples.layers} layers of the samples")
    if min(chosen.shard_sizes) < 1:
        raise ValueError(f"--shard-size must be >= 1, got {min(chosen.shard_sizes)}")
    if 1 not in chosen.layers:
        raise ValueError("--layers-per-chunk must have 1 in it, which is what the format keeps")
    return chosen
