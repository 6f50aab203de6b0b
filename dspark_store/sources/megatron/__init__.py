"""Corpora of token ids as Megatron-LM keeps them: pairs of a `.bin` and an `.idx` file.

In: a pair, and `MegatronOptions`. Out: samples with a cursor, and pairs that `PairBuilder` writes.
Read `source` first. `pair` opens the files, `plans` says which spans are samples, `windows` keeps the shuffled
indices that windows go by.
"""

from dspark_store.sources.megatron.builder import PairBuilder, write_samples
from dspark_store.sources.megatron.pair import IndexedPair, dtype_for_vocabulary, open_pair
from dspark_store.sources.megatron.plans import MegatronOptions
from dspark_store.sources.megatron.source import MegatronSource
from dspark_store.sources.megatron.windows import WindowIndices, WindowSettings, build_indices

__all__ = [
    "IndexedPair",
    "MegatronOptions",
    "MegatronSource",
    "PairBuilder",
    "WindowIndices",
    "WindowSettings",
    "build_indices",
    "dtype_for_vocabulary",
    "open_pair",
    "write_samples",
]
