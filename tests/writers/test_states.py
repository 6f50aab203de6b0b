import os
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark_store.format.dtypes import bits_tensor
from dspark_store.format.files import LocalObjectWriter
from dspark_store.format.ledger import state_ledger
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.schema import LAST, LAYERS, StateObject
from dspark_store.format.shard import ObjectRecord
from dspark_store.format.storage import LocalStorage
from dspark_store.writers import states as states_module
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.states import FinishedObjects, StateShardWriter, publish_states
from tests.writers.small_store import (
    BUFFER_BYTES,
    CHUNK_TOKENS,
    HIDDEN_SIZE,
    LAYER_IDS,
    LENGTHS,
    SHARED_SLOT,
    random_states,
    small_record,
    write_states,
)

TOKENS = "0" * 32
ROWS = LENGTHS[:4]
SAMPLES = len(ROWS)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def record_of(samples=SAMPLES, **options):
    record = small_record(**options)
    return replace(record, schema=record.schema.settled(samples), phase="states")


def writer_of(storage, pipeline, rows=SAMPLES, shared_slot=SHARED_SLOT, **options):
    record = record_of(rows, **options)
    return StateShardWriter(storage, record, 0, rows=rows, tokens=TOKENS, pipeline=pipeline, shared_slot=shared_slot)


def write_shard(storage, threads=1, buffer_bytes=BUFFER_BYTES, shared_slot=SHARED_SLOT):
    with EncodePipeline(threads, buffer_bytes) as pipeline:
        write_states(storage, record_of(), 0, ROWS, pipeline, tokens=TOKENS, shared_slot=shared_slot)


def stored_files(storage):
    return {path.relative_to(storage.root): path.read_bytes() for path in storage.root.rglob("*") if path.is_file()}


def opened(storage, column, slot=0):
    item = StateObject(column, slot, LAYER_IDS[slot] if column == LAYERS else None)
    record = record_of()
    expected = Expected(record.store_id, item.place(0), tokens=TOKENS)
    return open_object(storage, item.key(0), record.schema.states, expected)


def decoded(stored, row, length):
    """Read a row's chunks back one by one: (length, H) bfloat16."""
    schema = record_of().schema
    chunks = []
    for index in range(-(-length // CHUNK_TOKENS)):
        out = np.empty((CHUNK_TOKENS, HIDDEN_SIZE), schema.dtype.stored)
        stored.decode(row * schema.states.chunks_per_row + index, schema.chain(LAST), out)
        chunks.append(out)
    return bits_tensor(np.concatenate(chunks)[:length], torch.bfloat16)


def test_every_layer_of_every_row_comes_back(storage):
    write_shard(storage)
    for row, length in enumerate(ROWS):
        layers, last = random_states(length, row)
        for slot, states in enumerate(layers):
            assert torch.equal(decoded(opened(storage, LAYERS, slot), row, length), states.bfloat16())
        assert torch.equal(decoded(opened(storage, LAST), row, length), last.bfloat16())


def test_positions_past_the_end_are_not_stored(storage):
    write_shard(storage)
    per_row = record_of().schema.states.chunks_per_row
    present = opened(storage, LAST).tail.present.reshape(-1, per_row).sum(axis=1)
    assert present.tolist() == [-(-length // CHUNK_TOKENS) for length in ROWS]


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("buffer_bytes", [1, 500, BUFFER_BYTES])
def test_objects_are_equal_whatever_the_threads_and_the_buffer(tmp_path, threads, buffer_bytes):
    one, many = LocalStorage(tmp_path / "one"), LocalStorage(tmp_path / "many")
    write_shard(one)
    write_shard(many, threads, buffer_bytes)
    assert stored_files(many) == stored_files(one)


def test_the_shared_last_layer_is_one_file_in_two_places(storage):
    write_shard(storage)
    first, second = storage.path(f"{LAST}/c.0.0.0"), storage.path(f"{LAYERS}/c.0.0.{SHARED_SLOT}")
    assert first.samefile(second)
    assert first.stat().st_nlink == 2
    assert opened(storage, LAYERS, SHARED_SLOT).tail.label == opened(storage, LAST).tail.label
    assert len(opened(storage, LAST).tail.label.places) == 2


def test_without_a_shared_layer_every_object_is_its_own_file(storage):
    write_shard(storage, shared_slot=None)
    objects = [*storage.path(LAYERS).glob("c.*"), *storage.path(LAST).glob("c.*")]
    assert len({path.stat().st_ino for path in objects}) == len(LAYER_IDS) + 1


def test_rows_may_come_in_any_order(storage):
    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        for row in (2, 0, 3, 1):
            writer.add(row, *random_states(ROWS[row], row))
        writer.commit()
    assert torch.equal(decoded(opened(storage, LAST), 1, ROWS[1]), random_states(ROWS[1], 1)[1].bfloat16())


def test_a_row_that_is_added_twice_is_an_error(storage):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        writer.add(0, *random_states(3, 0))
        with pytest.raises(ValueError, match="slot 0 was written already"):
            add_and_commit(writer, 0)
        writer.abort()


def add_and_commit(writer, row):
    writer.add(row, *random_states(3, 0))
    writer.commit()


def test_nothing_is_visible_before_the_commit(storage):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        for row, length in enumerate(ROWS):
            writer.add(row, *random_states(length, row))
        pipeline.flush()
        assert storage.list(LAST) == storage.list(LAYERS) == []
        assert state_ledger(storage, record_of().schema).committed() == []
        writer.commit()
    assert state_ledger(storage, record_of().schema).committed() == [0]


def test_the_ledger_row_is_published_after_every_object(storage, monkeypatch):
    seen = {}
    put_new = LocalStorage.put_new

    def watched(self, key, data):
        seen[key] = (self.list(LAYERS), self.list(LAST))
        put_new(self, key, data)

    monkeypatch.setattr(LocalStorage, "put_new", watched)
    write_shard(storage)
    assert seen == {"ledger/states/c.0.0.0": ([f"c.0.0.{slot}" for slot in range(len(LAYER_IDS))], ["c.0.0.0"])}


def test_the_objects_of_a_shard_are_synced_at_the_same_time(storage, monkeypatch):
    meeting, finish = threading.Barrier(len(LAYER_IDS) + 1), LocalObjectWriter.finish

    def meet(writer):
        if "hidden_states" in writer.key and writer.key not in met:
            met.add(writer.key)
            meeting.wait(60)
        finish(writer)

    met = set[str]()
    monkeypatch.setattr(LocalObjectWriter, "finish", meet)
    write_shard(storage, shared_slot=None)
    assert len(met) == len(LAYER_IDS) + 1


def test_no_object_is_visible_before_all_are_durable(storage, monkeypatch):
    finish, visible = LocalObjectWriter.finish, []

    def watched(writer):
        visible.append(storage.list(LAYERS) + storage.list(LAST))
        finish(writer)

    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        monkeypatch.setattr(LocalObjectWriter, "finish", watched)
        asked = []
        writer.finish(lambda: asked.append(len(storage.list(LAYERS) + storage.list(LAST))))
    assert visible[: len(LAYER_IDS)] == [[]] * len(LAYER_IDS)
    assert asked[: len(LAYER_IDS) + 1] == [0] * (len(LAYER_IDS) + 1)
    assert len(asked) == 2 * len(LAYER_IDS)


def test_a_shard_that_was_drained_is_finished_whatever_fails_behind_it(storage):
    def fail():
        raise OSError("the next shard's disk")

    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        writer.drain()
        pipeline.submit(fail, 1, print)
        with pytest.raises(OSError, match="the next shard's disk"):
            pipeline.flush()
        assert len(writer.finish().records) == len(LAYER_IDS) + 1


def test_an_aborted_shard_leaves_nothing(storage):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        writer.add(0, *random_states(7, 0))
        writer.abort()
    assert stored_files(storage) == {}


def test_a_shard_that_was_aborted_can_be_written_again(storage, tmp_path):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        writer.add(0, *random_states(7, 0))
        writer.abort()
        write_states(storage, record_of(), 0, ROWS, pipeline, tokens=TOKENS)
    other = LocalStorage(tmp_path / "other")
    write_shard(other)
    assert stored_files(storage) == stored_files(other)


def test_a_failed_write_surfaces_and_leaves_nothing(storage, monkeypatch):
    def full(self, *parts):
        raise OSError(28, "No space left on device")

    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        monkeypatch.setattr(LocalObjectWriter, "write", full)
        with pytest.raises(OSError, match="No space left"):
            add_and_commit(writer, 0)
        writer.abort()
    assert stored_files(storage) == {}


def test_a_second_committer_of_a_shard_loses(storage):
    write_shard(storage)
    with pytest.raises(FileExistsError):
        write_shard(storage)


def test_rows_that_are_not_finite_are_reported_and_marked_in_the_trailer(storage):
    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        for row, length in enumerate(ROWS):
            layers, last = random_states(length, row)
            if row == 1:
                layers[0][length - 1, 0] = float("inf")
            writer.add(row, layers, last)
        report = writer.commit()
    assert report.nonfinite == (1,)
    assert opened(storage, LAYERS, 0).tail.label.nonfinite == (1,)
    assert opened(storage, LAYERS, 1).tail.label.nonfinite == ()


def test_the_report_counts_a_shared_object_once(storage):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        writer.add(0, *random_states(7, 0))
        report = writer.commit()
    objects = [*storage.path(LAYERS).glob("c.*"), *storage.path(LAST).glob("c.*")]
    sizes = {path.stat().st_ino: path.stat().st_size for path in objects}
    assert report.stored_bytes == sum(sizes.values())


def test_chunks_are_written_as_they_come(storage, monkeypatch):
    written = 0
    write = LocalObjectWriter.write

    def counted(self, *parts):
        nonlocal written
        written += sum(memoryview(part).nbytes for part in parts)
        write(self, *parts)

    monkeypatch.setattr(LocalObjectWriter, "write", counted)
    after_each_row = []
    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline, codec="none")
        for row in range(len(ROWS)):
            writer.add(row, *random_states(16, row))
            pipeline.flush()
            after_each_row.append(written)
        writer.abort()
    row_bytes = len(LAYER_IDS) * (16 * HIDDEN_SIZE * 2 + 2 * 4)
    assert after_each_row == [row_bytes * (row + 1) for row in range(len(ROWS))]


def peak_of_writing(storage, rows):
    with EncodePipeline(1, 4096) as pipeline:
        tracemalloc.start()
        writer = writer_of(storage, pipeline, rows, shard_size=rows, codec="none")
        for row in range(rows):
            writer.add(row, *random_states(16, row))
        writer.commit()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_rows_of_a_shard(tmp_path):
    few, many = 16, 512
    peaks = [peak_of_writing(LocalStorage(tmp_path / str(rows)), rows) for rows in (few, many)]
    objects, index_bytes = len(LAYER_IDS), 3 * 2 * (16 + 4)
    states_bytes = objects * 16 * HIDDEN_SIZE * 2
    assert peaks[1] - peaks[0] < (many - few) * (objects * index_bytes + states_bytes // 4)


def test_a_file_system_without_links_gets_a_copy(storage, monkeypatch):
    link = os.link

    def no_link(source, target, **options):
        if not source.startswith("."):  # what is published is linked too, from a hidden name
            raise PermissionError(1, "Operation not permitted")
        link(source, target, **options)

    monkeypatch.setattr(os, "link", no_link)
    write_shard(storage)
    first, second = storage.path(f"{LAST}/c.0.0.0"), storage.path(f"{LAYERS}/c.0.0.{SHARED_SLOT}")
    assert not first.samefile(second)
    assert first.read_bytes() == second.read_bytes()


def wide_record(codec="default", hidden=64, tokens=16, seq=80):
    """The record of a store whose chunks are encoded several to a task (2 KiB each)."""
    record = small_record(codec=codec)
    schema = replace(record.schema.settled(2), hidden_size=hidden, chunk_tokens=tokens, seq_length=seq)
    return replace(record, schema=schema, phase="states")


def write_rows(storage, record, rows, threads=2, shared_slot=None, *, more=False):
    """Write a shard whose rows hold the same states in each object; return what was finished."""
    with EncodePipeline(threads, BUFFER_BYTES) as pipeline:
        options = {"rows": len(rows), "tokens": TOKENS, "pipeline": pipeline, "shared_slot": shared_slot}
        writer = StateShardWriter(storage, record, 0, **options)
        for row, states in enumerate(rows):
            writer.add(row, [states] * len(LAYER_IDS), states, more=more and row + 1 < len(rows))
        return writer.finish()


def wide_rows(dtype=torch.bfloat16):
    """Rows of many chunks, of a whole number of them, and of less than one; (length, 64)."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(length, 64, generator=generator).to(dtype) for length in (77, 32)]


@pytest.mark.parametrize("codec", ["none", "fast", "default"])
@pytest.mark.parametrize("task_bytes", [1, 3 * 2048, 1 << 21])
def test_objects_are_equal_however_many_chunks_a_task_encodes(tmp_path, monkeypatch, codec, task_bytes):
    one, many = LocalStorage(tmp_path / "one"), LocalStorage(tmp_path / "many")
    write_rows(one, wide_record(codec), wide_rows(), threads=1)
    monkeypatch.setattr(states_module, "_TASK_BYTES", task_bytes)
    write_rows(many, wide_record(codec), wide_rows(), threads=3, more=True)
    assert stored_files(many) == stored_files(one)


@pytest.mark.parametrize(("task_bytes", "tasks"), [(1 << 21, 1), (5 * 2048, 2), (2048, 7)])
def test_rows_that_follow_at_once_share_tasks_of_a_limited_size(storage, monkeypatch, task_bytes, tasks):
    submitted, submit = [], EncodePipeline.submit

    def counted(pipeline, task, nbytes, sink):
        submitted.append(nbytes)
        submit(pipeline, task, nbytes, sink)

    monkeypatch.setattr(states_module, "_TASK_BYTES", task_bytes)
    monkeypatch.setattr(EncodePipeline, "submit", counted)
    write_rows(storage, wide_record(), wide_rows(), more=True)
    assert len(submitted) == tasks * (len(LAYER_IDS) + 1)
    assert max(submitted) <= 2 * max(task_bytes, 2048)


@pytest.mark.parametrize("codec", ["none", "default"])
def test_whole_chunks_that_are_encoded_in_place_equal_cast_and_copied_ones(tmp_path, codec):
    in_place, cast, strided = (LocalStorage(tmp_path / name) for name in ("in place", "cast", "strided"))
    rows = wide_rows()
    write_rows(in_place, wide_record(codec), rows)
    write_rows(cast, wide_record(codec), [states.float() for states in rows])
    write_rows(strided, wide_record(codec), [torch.stack([states, states], dim=1)[:, 0] for states in rows])
    assert stored_files(in_place) == stored_files(cast) == stored_files(strided)


@pytest.mark.parametrize(("row", "position"), [(0, 0), (0, 76), (1, 31)])
def test_a_value_that_is_not_finite_is_found_in_any_chunk_of_any_thread(storage, row, position):
    rows = wide_rows()
    rows[row][position, 63] = -torch.inf
    assert write_rows(storage, wide_record(), rows, threads=3).nonfinite == (row,)


def test_a_value_too_large_for_the_cache_dtype_is_not_finite(storage):
    rows = wide_rows(torch.float32)
    rows[1][3, 3] = 3.4e38
    assert write_rows(storage, wide_record(), rows).nonfinite == (1,)


def test_the_rest_of_a_last_chunk_is_no_value(storage):
    states = torch.ones(3, HIDDEN_SIZE)
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = writer_of(storage, pipeline)
        for row in (0, 1):
            writer.add(row, [states] * len(LAYER_IDS), states)
        assert writer.commit().nonfinite == ()
    assert torch.isnan(decoded(opened(storage, LAST), 0, CHUNK_TOKENS)[3:]).all()


@pytest.mark.parametrize("codec", ["none", "default"])
def test_a_shard_needs_few_buffers(storage, monkeypatch, codec):
    made, empty = [], np.empty

    def counted(shape, dtype):
        made.append(shape)
        return empty(shape, dtype)

    monkeypatch.setattr(np, "empty", counted)
    record, buffer_bytes = wide_record(codec), 40_000
    with EncodePipeline(2, buffer_bytes) as pipeline:
        writer = StateShardWriter(storage, record, 0, rows=2, tokens=TOKENS, pipeline=pipeline)
        for row, states in enumerate(wide_rows(torch.float32)):
            writer.add(row, [states] * len(LAYER_IDS), states)
        writer.commit()
    chunks = (5 + 2) * (len(LAYER_IDS) + 1)
    assert sum(made) <= buffer_bytes < chunks * 2048


def stage_writer(storage, pipeline, objects, shared_slot=SHARED_SLOT):
    record = record_of()
    options = {"rows": 1, "tokens": TOKENS, "pipeline": pipeline, "shared_slot": shared_slot, "objects": objects}
    return StateShardWriter(storage, record, 0, **options)


def test_two_stages_write_what_one_writer_does(tmp_path):
    alone, together = LocalStorage(tmp_path / "alone"), LocalStorage(tmp_path / "together")
    layers, last = random_states(9, 0)
    schema = record_of().schema
    with EncodePipeline(2, BUFFER_BYTES) as pipeline:
        whole = stage_writer(alone, pipeline, None)
        whole.add(0, layers, last)
        expected = whole.commit()
        first = stage_writer(together, pipeline, schema.state_objects[:2])
        second = stage_writer(together, pipeline, schema.state_objects[2:])
        first.add(0, [layers[0], layers[1], None], None)
        second.add(0, [None, None, layers[2]], last)
        parts = [FinishedObjects.from_json(writer.finish().to_json(), schema) for writer in (first, second)]
    assert [sorted(item.slot for item in part.records) for part in parts] == [[0, 1], [0, 2]]
    assert publish_states(together, schema, 0, parts) == expected
    assert stored_files(together) == stored_files(alone)
    with pytest.raises(FileExistsError):
        publish_states(together, schema, 0, parts)


def test_states_that_a_stage_should_hold_and_does_not_are_an_error(storage):
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = stage_writer(storage, pipeline, record_of().schema.state_objects[:1])
        with pytest.raises(ValueError, match=r"states of .* are missing"):
            writer.add(0, [None, None, None], None)
        writer.abort()


def test_a_shard_whose_parts_lack_an_object_is_not_published(storage):
    schema = record_of().schema
    with EncodePipeline(1, BUFFER_BYTES) as pipeline:
        writer = stage_writer(storage, pipeline, schema.state_objects[:2])
        layers, last = random_states(9, 0)
        writer.add(0, layers, last)
        part = writer.finish()
    with pytest.raises(KeyError):
        publish_states(storage, schema, 0, [part])
    assert state_ledger(storage, schema).committed() == []


def test_finished_objects_travel_as_json(storage):
    record = wide_record()
    done = write_rows(storage, record, wide_rows(), shared_slot=SHARED_SLOT)
    back = FinishedObjects.from_json(done.to_json(), record.schema)
    assert back == done
    assert len(back.records) == len(record.schema.state_objects)


def test_rows_of_several_parts_that_are_not_finite_are_put_together(storage):
    schema = record_of().schema
    records = {item: ObjectRecord(1, 2) for item in schema.state_objects}
    parts = [FinishedObjects(records, 10, (3, 1)), FinishedObjects({}, 5, (1, 0))]
    report = publish_states(storage, schema, 0, parts)
    assert (report.stored_bytes, report.nonfinite) == (15, (0, 1, 3))
