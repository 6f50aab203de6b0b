"""What copying states costs, beside reading them alone and writing them alone, and the memory of a copy over R.

``python -m benchmarks.rechunk STORE [--codec default] [--threads 2]``: alternating runs of the three, by the same
threads over the same shards, as bytes of states before compression a second. The store must fit into memory, from which
it is written. Memory is the peak resident set above the level before a whole copy, each R in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.resident import peak_of, resident_bytes
from dspark_store.format.metadata import read_seal, write_metadata
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import CopySettings, CopySize, copy_record
from dspark_store.inspection.copy_shards import CopyTask, copy_states, copy_tokens
from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers, map_shards
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.writers.lock import StoreLock
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.states import StateShardWriter

BUFFER_BYTES = 64 * 1024 * 1024

type States = tuple[list[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Bench:
    """A store, what it is copied to, and by how many threads."""

    source: Path
    settings: CopySettings
    threads: int

    def read(self) -> dict[int, list[States]]:
        """Read every shard, a sample at a time, as copying does; return the states of each."""
        cache = open_cache(self.source, allow_reduced_depth=True)
        shards = range(cache.schema.tokens.num_shards)
        return dict(map_shards(lambda shard: [*read_shard(cache, shard)], shards, threads=self.threads))

    def write(self, states: dict[int, list[States]], place: Path) -> None:
        """Write the states of every shard, with the source's R and the copy's codec and chunks."""
        cache = open_cache(self.source, allow_reduced_depth=True)
        record = copy_record(cache.record, "", replace(self.settings, shard_size=None))
        storage = LocalStorage(place)
        write_metadata(storage, record)
        shared = next((slot for slot in range(record.schema.num_layers) if cache.index.is_shared(0, slot)), None)

        def write_shard(shard: int) -> None:
            with EncodePipeline(1, BUFFER_BYTES) as pipeline:
                options = {"rows": len(states[shard]), "tokens": "0" * 32, "pipeline": pipeline, "shared_slot": shared}
                writer = StateShardWriter(storage, record, shard, **options)  # type: ignore[arg-type] # each its own
                for row, (layers, last) in enumerate(states[shard]):
                    writer.add(row, layers, last)
                writer.commit()

        for _ in map_shards(write_shard, sorted(states), threads=self.threads):
            pass

    def copy(self, place: Path) -> float:
        """Copy the store's states, to where its tokens are; return the seconds that it took."""
        cache, storage = open_cache(self.source, allow_reduced_depth=True), LocalStorage(place)
        seal = read_seal(LocalStorage(self.source))
        record = copy_record(cache.record, seal, replace(self.settings, shard_size=None))
        shards = range(record.schema.tokens.num_shards)
        with StoreLock(storage) as lock:
            write_metadata(storage, record)
            task = CopyTask(LocalStorage(self.source), seal, storage, record, lock.holder)
            for shard in shards:
                copy_tokens(task, shard)
            task = replace(task, record=settle_tokens(storage, record))
            return seconds_of(lambda: [*map_shards(partial(copy_states, task), shards, threads=self.threads)])


def read_shard(cache: Cache, shard: int) -> Sequence[States]:
    """Read a shard's states, sample by sample."""
    rows: list[States] = []
    for sample in cache.schema.tokens.rows(shard):
        valid = slice(0, int(cache.lengths[sample]))
        batch = cache.read([sample], columns=(LAYERS, LAST), positions=valid, layout="stacked")
        rows.append((list(batch[LAYERS][0]), batch[LAST][0]))
    return rows


def seconds_of(action: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def report_rates(bench: Bench, place: Path, repeats: int) -> None:
    """Measure and print the three rates, and the copy's against what the other two come to one after the other."""
    cache = open_cache(bench.source, allow_reduced_depth=True)
    raw = CopySize(cache, cache.record).raw(range(cache.schema.tokens.num_shards))
    states = bench.read()
    times: dict[str, list[float]] = {"reading": [], "writing": [], "copying": []}
    for repeat in range(repeats):
        times["reading"].append(seconds_of(bench.read))
        times["writing"].append(seconds_of(lambda repeat=repeat: bench.write(states, place / f"w{repeat}")))  # type: ignore[misc]
        times["copying"].append(bench.copy(place / f"c{repeat}"))
        shutil.rmtree(place / f"w{repeat}")
        shutil.rmtree(place / f"c{repeat}")
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"{raw / 1e6:.0f} MB of states, {bench.threads} threads, medians of {repeats} alternating runs")
    for name, seconds in median.items():
        print(f"{name:8s} {raw / 1e6 / seconds:8.0f} MB/s")
    both = median["reading"] + median["writing"]
    print(f"copying takes {median['copying'] / both:.2f} of reading and then writing; it reads what it wrote as well")


def report_memory(bench: Bench, place: Path) -> None:
    """Print the peak memory of copies with a small and with one whole shard."""
    samples = len(open_cache(bench.source, allow_reduced_depth=True))
    for rows in (4, samples):
        command = [sys.executable, "-m", "benchmarks.rechunk", str(bench.source), "--memory-of", str(rows)]
        command += ["--codec", str(bench.settings.codec), "--place", str(place / f"m{rows}")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"peak memory, R={rows:<5d} {json.loads(done.stdout)['peak'] / 2**20:8.1f} MiB above the level before")


def measure_memory(bench: Bench, place: Path) -> int:
    """Return the peak resident bytes of a copy by one thread above the level before, in this very process."""
    before = resident_bytes("VmRSS")
    return peak_of(lambda: rechunk(bench.source, place, bench.settings, workers=Workers(bench.threads))) - before


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rechunk", description=__doc__)
    parser.add_argument("store", type=Path, help="a finished store")
    parser.add_argument("--codec", default="default", help="codec preset of the copy (default: default)")
    parser.add_argument("--threads", type=int, default=2, help="shards side by side (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="alternating runs (default: 5)")
    parser.add_argument("--place", type=Path, help="directory to write in (default: a temporary one)")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bench = Bench(given.store, CopySettings(codec=given.codec), given.threads)
    if given.memory_of:
        alone = Bench(given.store, CopySettings(codec=given.codec, shard_size=given.memory_of), 1)
        print(json.dumps({"peak": measure_memory(alone, given.place)}))
        return 0
    with tempfile.TemporaryDirectory(dir=given.place) as temporary:
        report_rates(bench, Path(temporary), given.repeats)
        report_memory(bench, Path(temporary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
