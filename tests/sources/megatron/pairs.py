"""Small pairs for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_store.sources.megatron import PairBuilder


def write_pair(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    dtype: str = "int32",
    lengths: Sequence[Sequence[int]] | None = None,
) -> Path:
    """Write one document each, of one sequence each unless their lengths are given."""
    with PairBuilder(prefix, dtype=np.dtype(dtype)) as builder:
        for number, tokens in enumerate(documents):
            builder.add_document(tokens, None if lengths is None else lengths[number])
    return prefix


def numbered(sizes: Sequence[int]) -> list[list[int]]:
    """Documents in which token i of document d is 100 * d + i."""
    return [[100 * document + token for token in range(size)] for document, size in enumerate(sizes)]
