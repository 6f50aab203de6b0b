"""Samples written as pairs: one of their ids, and one of their loss masks."""

from collections.abc import Iterable
from os import PathLike

import numpy as np

from dspark_store.sources.megatron.builder import PairBuilder
from dspark_store.sources.megatron.layout import dtype_for_vocabulary
from dspark_store.sources.source import Sample


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
    if mask_prefix is None:
        with PairBuilder(prefix, dtype=dtype_for_vocabulary(vocab_size)) as ids:
            for sample in samples:
                ids.add_document(sample.input_ids)
        return
    with (
        PairBuilder(mask_prefix, dtype=np.uint8) as masks,
        PairBuilder(prefix, dtype=dtype_for_vocabulary(vocab_size)) as ids,
    ):
        for sample in samples:
            ids.add_document(sample.input_ids)
            masks.add_document(sample.loss_mask)
