"""A store that an engine of its own writes: pushed in any order, divided by numbers, gone on with after any end."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import dspark_store
from dspark_store.format.ledger import state_ledger
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.sources.dummy import DummySource
from dspark_store.sources.source import SourceError
from dspark_store.writers.lock import LOCK_KEY, LostLockError
from tests.processes import ENVIRONMENT

HIDDEN, LAYERS, DEPTH, VOCAB, SEQ, SHARD = 8, (0, 2, 3), 4, 50, 12, 4
CONFIG = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": DEPTH, "model_type": "llama"}


def tokens(samples=11, seed=0):
    random = np.random.default_rng(seed)
    rows = [random.integers(0, VOCAB, random.integers(1, SEQ + 1)) for _ in range(samples)]
    return [(row, random.integers(0, 2, len(row))) for row in rows]


def states(ids):
    """What the engine gives for some ids: layers 0 and 2, and the state after the final norm. A function of the ids."""
    base = torch.outer(torch.as_tensor(np.asarray(ids)).float() + 1, torch.linspace(-1, 1, HIDDEN))
    return {0: base, 2: base * 2}, base.cos()


def create(path, rows=None, **changes):
    options = {
        "target_config": CONFIG,
        "layer_ids": LAYERS,
        "seq_length": SEQ,
        "shard_size": SHARD,
        "equality_class": "ours",
        **changes,
    }
    return dspark_store.create_store(path, tokens() if rows is None else rows, **options)


def fill(writer, samples=None):
    for sample in writer.missing() if samples is None else samples:
        ids = writer.input_ids(sample)
        writer.add(sample, *states(ids), token_ids=ids)


def check(path, rows=None):
    cache = dspark_store.open_cache(path)
    assert dspark_store.verify_store(cache) == []
    rows = tokens() if rows is None else rows
    assert len(cache) == len(rows)
    for number, (ids, mask) in enumerate(rows):
        layers, last = states(ids)
        sample = {name: values[: len(ids)] for name, values in cache[number].items()}
        assert sample["input_ids"].tolist() == ids.tolist()
        assert sample["loss_mask"].tolist() == mask.tolist()
        assert torch.equal(sample["target_last_hidden_states"], last.bfloat16())
        expected = torch.cat([layers[0], layers[2], last], 1).bfloat16()
        assert torch.equal(sample["target_hidden_states"], expected)


def test_states_pushed_in_any_order_from_several_threads_make_the_store(tmp_path):
    rows = tokens()
    with create(tmp_path, rows) as writer, ThreadPoolExecutor(4) as pool:
        order = np.random.default_rng(1).permutation(len(rows)).tolist()
        list(pool.map(lambda sample: fill(writer, [sample]), order))
        writer.finish()
    check(tmp_path, rows)
    assert not (tmp_path / LOCK_KEY).exists()


@pytest.mark.parametrize("kind", [np.float32, np.float16, "bfloat16"])
def test_numpy_arrays_and_an_iterator_and_ids_alone_will_do(kind, tmp_path):
    rows = [ids for ids, _ in tokens()]
    with create(tmp_path, iter(rows)) as writer:
        for sample in writer.missing():
            layers, last = states(writer.input_ids(sample))
            if kind == "bfloat16":
                ml_dtypes = pytest.importorskip("ml_dtypes")
                given = [
                    each.bfloat16().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
                    for each in (*layers.values(), last)
                ]
            else:
                given = [each.numpy().astype(kind) for each in (*layers.values(), last)]
            writer.add(sample, dict(zip(layers, given, strict=False)), given[-1])
        writer.finish()
    cache = dspark_store.open_cache(tmp_path)
    assert [int(cache[number]["loss_mask"].sum()) for number in range(len(cache))] == [len(ids) for ids in rows]
    _, last = states(rows[5])
    kept = last if kind == "bfloat16" else torch.from_numpy(last.numpy().astype(kind))
    assert torch.equal(cache[5]["target_last_hidden_states"][: len(rows[5])], kept.bfloat16())


def test_a_source_is_taken_as_it_is(tmp_path):
    source = DummySource(samples=6, min_length=2, max_length=SEQ, vocab=VOCAB, seed=1)
    with create(tmp_path, source) as writer:
        fill(writer)
        writer.finish()
    rows = [(sample.input_ids, sample.loss_mask) for sample in source.read()]
    check(tmp_path, rows)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_workers_share_whole_shards_without_a_sample_twice_however_far_others_are(workers, tmp_path):
    with create(tmp_path) as writer:
        first = [writer.missing(worker, workers) for worker in range(workers)]
        fill(writer, first[0])
        writer.flush()
        joined = dspark_store.join_store(tmp_path, writer.key)
        again = [joined.missing(worker, workers) for worker in range(workers)]
        joined.__exit__(None, None, None)
    assert sorted(sample for part in first for sample in part) == list(range(11))
    assert again == [[], *first[1:]]
    for part in first:
        shards = {sample // SHARD for sample in part}
        assert len(part) == sum(min(SHARD, 11 - shard * SHARD) for shard in shards)


def test_a_process_that_joins_adds_its_share_under_the_lock_of_the_first(tmp_path):
    worker = f"""
import dspark_store, sys
from tests.precompute.test_engine import fill
with dspark_store.join_store({str(tmp_path)!r}, sys.argv[1]) as writer:
    fill(writer, writer.missing(1, 2))
    writer.finish()
"""
    with create(tmp_path) as writer:
        fill(writer, writer.missing(0, 2))
        with pytest.raises(ValueError, match="shards have no states yet, such as"):
            writer.finish()
        subprocess.run([sys.executable, "-c", worker, writer.key], env=ENVIRONMENT, check=True)
        writer.finish()
    check(tmp_path)
    with pytest.raises(LostLockError):
        dspark_store.join_store(tmp_path, writer.key)
    with pytest.raises(ValueError, match="no key of a store's writer"):
        dspark_store.join_store(tmp_path, "{}")


@pytest.mark.parametrize("added", range(0, 12, 3))
def test_what_was_not_committed_is_missing_for_the_next_start_and_nothing_else_is(added, tmp_path):
    with create(tmp_path) as writer:
        fill(writer, range(added))
    with create(tmp_path) as writer:
        committed = min(added, 11) // SHARD * SHARD
        assert sorted(writer.missing()) == list(range(committed, 11))
        fill(writer)
        writer.finish()
    check(tmp_path)
    with create(tmp_path) as writer:
        assert writer.missing() == []
        writer.finish()


def test_a_process_that_is_killed_loses_its_open_shards_alone(tmp_path):
    script = f"""
import os, signal
from tests.precompute.test_engine import create, fill
writer = create({str(tmp_path)!r})
fill(writer, range(6))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT).returncode == -9
    with create(tmp_path) as writer:
        assert sorted(writer.missing()) == list(range(4, 11))
        fill(writer)
        writer.finish()
    check(tmp_path)


def test_a_writer_whose_lock_is_taken_over_commits_no_more(tmp_path):
    with create(tmp_path) as writer:
        fill(writer, range(3))
        (tmp_path / LOCK_KEY).write_text("another's")
        fill(writer, [3])
        with pytest.raises(LostLockError):
            writer.finish()
    storage = LocalStorage(tmp_path)
    assert state_ledger(storage, read_record(storage).schema).committed() == []


def test_samples_with_values_that_are_not_finite_are_marked(tmp_path):
    with create(tmp_path) as writer:
        for sample in writer.missing():
            layers, last = states(writer.input_ids(sample))
            if sample == 5:
                layers[2][0, 0] = torch.inf
            writer.add(sample, layers, last)
        writer.finish()
    assert np.flatnonzero(dspark_store.open_cache(tmp_path).status).tolist() == [5]


def test_an_engine_may_use_its_buffers_again(tmp_path):
    layers, last = [{layer: torch.empty(SEQ, HIDDEN) for layer in (0, 2)}, torch.empty(SEQ, HIDDEN)]
    with create(tmp_path) as writer:
        for sample in writer.missing():
            ids = writer.input_ids(sample)
            given, final = states(ids)
            for layer in given:
                layers[layer][: len(ids)] = given[layer]
            last[: len(ids)] = final
            writer.add(sample, {layer: each[: len(ids)] for layer, each in layers.items()}, last[: len(ids)])
        writer.finish()
    check(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ids, layers, last: ({0: layers[0]}, last, ids),
            r"has states of layers \[0\], the store has \[0, 2, 3\]",
        ),
        (lambda ids, layers, last: ({**layers, 1: last}, last, ids), r"layers \[0, 1, 2\]"),
        (lambda ids, layers, last: ({**layers, 3: last * 2}, last, ids), "layer 3 of sample 0 is the target's last"),
        (lambda ids, layers, last: (layers, last[:, 1:], ids), r"the last state of sample 0 has shape .* expected"),
        (lambda ids, layers, last: (layers, torch.cat([last, last]), ids), "the last state of sample 0 has shape"),
        (lambda ids, layers, last: (layers, last.long(), ids), "must be a torch tensor or numpy array of floating"),
        (lambda ids, layers, last: (layers, last, (ids + 1) % VOCAB), "at position 0 of sample 0, the store has"),
        (lambda ids, layers, last: (layers, last, ids[1:]), "token ids for sample 0, the store has"),
    ],
)
def test_states_of_something_else_are_refused_and_the_sample_may_be_added_again(change, message, tmp_path):
    with create(tmp_path) as writer:
        ids = writer.input_ids(0)
        layers, last, given = change(ids, *states(ids))
        with pytest.raises(ValueError, match=message):
            writer.add(0, layers, last, token_ids=given)
        fill(writer)
        writer.finish()
    check(tmp_path)


def test_a_sample_is_added_once(tmp_path):
    with create(tmp_path) as writer:
        fill(writer, [0])
        with pytest.raises(ValueError, match="sample 0 were added before"):
            fill(writer, [0])
        with pytest.raises(ValueError, match="sample 11 is not one of 0 to 10"):
            writer.add(11, {}, torch.empty(0))
        with pytest.raises(ValueError, match=r"10 samples|3 samples of 1 begun shards were not added, such as 1"):
            writer.finish()
        fill(writer, range(1, 4))
        writer.flush()
        with pytest.raises(ValueError, match="sample 0 are in the store already"):
            fill(writer, [0])


def test_no_more_shards_are_open_than_may_be(tmp_path):
    with create(tmp_path, open_shards=2) as writer:
        fill(writer, [0, 4])
        with pytest.raises(ValueError, match="sample 8 is of shard 2, and 2 shards are open already"):
            fill(writer, [8])
        fill(writer, [1, 2, 3, 8, 9, 10, 5, 6, 7])
        writer.finish()
    check(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], []], "sample 1 has ids of shape"),
        ([[1] * (SEQ + 1)], "sample 0 has ids of shape"),
        ([[1.5]], "type float64"),
        ([[VOCAB]], f"sample 0 has ids outside of 0 to {VOCAB - 1}"),
        ([([1, 2], [1])], "the loss mask of sample 0 must be 2 values"),
        ([([1], [2])], "the loss mask of sample 0"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused_by_its_number_and_leaves_no_store(rows, message, tmp_path):
    with pytest.raises(SourceError, match=message):
        create(tmp_path / "store", rows)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (0, 2)}, "does not match this run in target_layer_ids"),
        ({"rows": tokens(seed=1)}, "does not match this run in source"),
        ({"identity": {"target_weights": "b"}}, "does not match this run in target_weights"),
        ({"equality_class": "another"}, "begun in the equality class 'ours' and this run is in 'another'"),
    ],
)
def test_a_store_of_something_else_is_not_gone_on_with(changes, message, tmp_path):
    with create(tmp_path) as writer:
        fill(writer, range(4))
    with pytest.raises(ValueError, match=message):
        create(tmp_path, **changes)


def test_a_store_is_written_by_one_at_a_time(tmp_path):
    with create(tmp_path), pytest.raises(BlockingIOError, match="is being written by process"):
        create(tmp_path)


def test_weights_of_the_target_are_kept(tmp_path):
    embed = torch.randn(VOCAB, HIDDEN)
    with create(tmp_path, producer={"engine": "ours 1.0"}) as writer:
        writer.add_weights(embed.numpy(), logit_scale=2.0)
        fill(writer)
        writer.finish()
    cache = dspark_store.open_cache(tmp_path)
    assert torch.equal(cache.weights().embed, embed.bfloat16())
    assert (cache.head["tied"], cache.head["logit_scale"]) == (True, 2.0)
    producer = read_record(LocalStorage(tmp_path)).producers[0]
    assert (producer["engine"], producer["equality_class"]) == ("ours 1.0", "ours")


def test_an_error_of_the_disk_is_raised_and_the_shard_is_missing(tmp_path, monkeypatch):
    failing = threading.Event()
    put_new = LocalStorage.put_new

    def fail(self, key, data):
        if failing.is_set() and key.startswith("ledger/states"):
            raise OSError(28, "no space")
        return put_new(self, key, data)

    monkeypatch.setattr(LocalStorage, "put_new", fail)
    with create(tmp_path) as writer:
        failing.set()
        fill(writer, range(4))
        with pytest.raises(OSError, match="no space"):
            writer.finish()
    failing.clear()
    with create(tmp_path) as writer:
        assert sorted(writer.missing()) == list(range(11))
        fill(writer)
        writer.finish()
    check(tmp_path)


@pytest.mark.parametrize(
    ("convention", "ids", "ours"),
    [
        ("vllm", [2, 15, 27], [1, 14, 26]),
        ("speculators", [0, 3], [-1, 2]),
        ("transformers", [1], [0]),
        ("sglang", [1, 14], [1, 14]),
    ],
)
def test_layer_ids_of_an_engine_become_ours(convention, ids, ours):
    assert dspark_store.convert_layer_ids(ids, convention=convention) == ours


@pytest.mark.parametrize("ids", [[27, 2], [2, 2], [-1], [], [1.5]])
def test_layer_ids_that_an_engine_would_sort_or_not_take_are_refused(ids):
    with pytest.raises(ValueError, match="layer ids"):
        dspark_store.convert_layer_ids(ids, convention="vllm")
    with pytest.raises(ValueError, match="convention 'hf' is not known; expected one of sglang"):
        dspark_store.convert_layer_ids([1], convention="hf")
