"""A long source whose tokenising is killed half-way: what is committed is neither read nor tokenised again."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.ledger import token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import has_store, read_record, write_metadata
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import sample_digest
from dspark_store.precompute.tokenise import tokenise
from dspark_store.readers.index import StoreIndex
from dspark_store.sources.chat import ROWS_PER_TASK, ChatSource
from dspark_store.sources.encode import TASKS_PER_WORKER
from dspark_store.sources.jsonl import JsonlRows
from dspark_store.writers.recovery import sweep_uncommitted
from tests.processes import until
from tests.tiny import tiny_tokenizer, write_chats

CHATS, SHARD_SIZE, WORKERS, LENGTH = 3_000, 128, 2, 512
READ_AHEAD = WORKERS * TASKS_PER_WORKER * ROWS_PER_TASK
SPAWN = multiprocessing.get_context("spawn")


def run(chats: Path, store: Path, trace: Path) -> None:
    """Tokenise the chats into a store, going on where it is; the trace holds the numbers of the rows read."""
    take = JsonlRows.take

    def traced(self, rows):
        with trace.open("a") as file:
            file.write(f"{json.dumps([int(row) for row in rows])}\n")
        return take(self, rows)

    JsonlRows.take = traced  # type: ignore[method-assign]
    schema = StoreSchema(0, SHARD_SIZE, LENGTH, 4, 1, (0,), cache_dtype("bf16"), "default", LENGTH)
    storage = LocalStorage(store)
    if not has_store(storage):
        write_metadata(storage, StoreRecord("0" * 32, schema, manifest={"num_layers": 1}))
    record = read_record(storage)
    sweep_uncommitted(storage, record)
    tokenise(storage, record, ChatSource(chats, tiny_tokenizer(), seq_length=LENGTH, num_workers=WORKERS))


def start(*where: Path) -> multiprocessing.process.BaseProcess:
    process = SPAWN.Process(target=run, args=where)
    process.start()
    return process


def rows_of(trace: Path) -> list[int]:
    return [row for line in trace.read_text().splitlines() for row in json.loads(line)]


@pytest.mark.storm
def test_a_killed_token_phase_repeats_at_most_one_shard(tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", CHATS)
    store, first, second = tmp_path / "store", tmp_path / "first", tmp_path / "second"
    process = start(chats, store, first)
    ledger = token_ledger(LocalStorage(store))
    until(lambda: len(ledger.committed()) * SHARD_SIZE > CHATS // 2, limit=300)
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type] # it has started
    process.join()
    committed = ledger.committed()
    assert CHATS // 2 < len(committed) * SHARD_SIZE < CHATS
    rows = [ledger.row(shard).tolist() for shard in committed]

    process = start(chats, store, second)
    process.join()
    assert process.exitcode == 0
    done = len(committed) * SHARD_SIZE
    assert rows_of(second) == list(range(done, CHATS))
    assert max(rows_of(first)) < done + SHARD_SIZE + READ_AHEAD
    assert [ledger.row(shard).tolist() for shard in committed] == rows

    samples = ChatSource(chats, tiny_tokenizer(), seq_length=LENGTH).read()
    expected = b"".join(sample_digest(sample.input_ids, sample.loss_mask) for sample in samples)
    storage = LocalStorage(store)
    assert StoreIndex(storage, read_record(storage)).digest.tobytes() == expected
