"""What ``dspark-store info`` takes on a store of a million samples in 4,000 shards, complete and growing.

``python -m benchmarks.info`` times the command as a user calls it, the start of its process included. There is no state
behind the stores: the command reads none. The growing one lacks a shard in a hundred, and has 4,000 ledger rows of
tokens and 3,960 of states, each a file.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.costs import elapsed
from benchmarks.flags import parsed
from benchmarks.loader_scale import SAMPLES, SHARDS, write_index
from benchmarks.samples import unsynced
from dspark_store.format.ledger import Ledger
from dspark_store.format.metadata import read_record, write_metadata
from dspark_store.format.schema import INDEX_OBJECTS, INDEX_STATUS, STATE_LEDGER, TOKEN_LEDGER, TOKEN_OBJECTS
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import LocalStorage
from dspark_store.readers.index import StoreIndex

LACKING = 100
"""One shard in so many has no states in the growing store."""


def write_growing_index(place: Path) -> None:
    """Write the same store as `write_index`, as it is while its states are captured; nothing is synced."""
    write_index(place)
    storage = LocalStorage(place)
    record = read_record(storage)
    table, tokens = StoreIndex(storage, record).objects, len(TOKEN_OBJECTS)
    kept = {path: digest for path, digest in record.checksums.items() if path not in (INDEX_STATUS, INDEX_OBJECTS)}
    with unsynced():
        for shard, rows in enumerate(table):
            _publish(storage, TOKEN_LEDGER, shard, rows[:tokens])
            if shard % LACKING:
                _publish(storage, STATE_LEDGER, shard, rows[tokens:])
        write_metadata(storage, replace(record, phase="states", declared_complete=False, checksums=kept))


def _publish(storage: LocalStorage, path: str, shard: int, row: np.ndarray) -> None:
    records = [ObjectRecord(int(nbytes), int(digest)) for nbytes, digest in row]
    Ledger(storage, path, len(records)).publish(shard, records)


def seconds_of_command(place: Path, repeats: int) -> list[float]:
    """Run the command as a process, several times; return what each took."""
    command = [sys.executable, "-m", "dspark_store.cli", "info", str(place)]
    run = partial(subprocess.run, command, check=True, capture_output=True)
    return [elapsed(run).clock for _ in range(repeats)]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    given = parsed("info", arguments)
    print(f"{SAMPLES:,} samples, {SHARDS:,} shards; {os.cpu_count()} cores; the whole process, aim 2 s")
    for name, write in (("complete", write_index), ("growing", write_growing_index)):
        with tempfile.TemporaryDirectory(dir=given.place) as temporary:
            write(Path(temporary))
            seconds = seconds_of_command(Path(temporary), given.repeats)
        print(f"{name:<10}median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
