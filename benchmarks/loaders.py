"""Batches from disk: whole epochs of the loader with its defaults beside other readers, alternating in one run.

``python -m benchmarks.loaders [--quick] [--store STORE] [--epochs-only] [--place DIR] [--json FILE]``. Every contender
reads as many batches of full rows, over four links: warm, from the page cache; cold, dropped from it before every
epoch; and behind two lines of fixed rate. Beside them stand bounds of the same bytes: the loader's requests without
decoding, copying decoded rows into a batch, and decoding what is in memory. Writing is measured too, to the disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.flags import parsed
from benchmarks.tables import Recorder

if TYPE_CHECKING:
    from benchmarks.samples import Samples

SIZES = ((512, 576, 64), (1024, 2560, 32))
"""S, H and the samples of synthetic states."""
QUICK = (256, 256, 16)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    given = parsed("loaders", arguments)
    from benchmarks import reading  # which takes torch and zarr, and help does not

    recorder = Recorder("loaders", arguments)
    source = "synthetic" if given.store is None else "real"
    threads = f"{reading.THREADS} threads"
    recorder.describe(
        f"{source} states, K={reading.LAYERS} and the last state, batches of {reading.BATCH}, shape full, {threads}"
    )
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        for samples in _samples(given):
            name = f"H={samples.width}, S={samples.seq_length}, {len(samples.lengths)} samples"
            epochs = 1 if given.quick else given.epochs
            reading.measure(samples, name, Path(temporary) / name, recorder, epochs, epochs_only=given.epochs_only)
    recorder.save(given.json)
    return 0


def _samples(given: argparse.Namespace) -> Iterator[Samples]:
    from benchmarks import reading, samples

    if given.store is not None:
        yield samples.stored_samples(given.store, count=given.samples or 80, layers=reading.LAYERS)
        return
    one = given.width or given.seq_length
    sizes = (QUICK,) if given.quick else SIZES[1:] if one else SIZES
    for seq_length, width, count in sizes:
        size = (given.seq_length or seq_length, given.width or width, reading.LAYERS, given.samples or count)
        yield samples.synthetic_samples(*size, ragged=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
