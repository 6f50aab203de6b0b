"""An interrupted copy goes on; what is no such copy, or damaged, or in other hands is refused and left as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark_store import DamagedStoreError, open_cache
from dspark_store.format.codecs import CodecChain
from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.schema import IDS, LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection import copy_shards
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from dspark_store.inspection.shardwise import Workers
from dspark_store.writers.lock import LOCK_KEY, StoreLock
from dspark_store.writers.states import publish_states
from tests.inspection.copies import MANIFEST, OTHER, assert_copied, contents, phase_of
from tests.stores import build_store, flip

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def source(tmp_path):
    fields = {"manifest": MANIFEST}
    return build_store(tmp_path / "source", fields=fields).path


def refusal(source: Path, place: Path, settings: CopySettings | None = None) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        rechunk(source, place, settings or CopySettings())
    assert "\n" not in str(error.value)
    return str(error.value)


def stopped(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Copy until so many shards of states are committed, then fail."""
    done: list[int] = []

    def publish(*args):
        if len(done) == shards:
            raise MemoryError("stopped by the test")
        done.append(args[2])
        return real(*args)

    real = publish_states
    monkeypatch.setattr(copy_shards, "publish_states", publish)
    with pytest.raises(MemoryError):
        rechunk(source, place, OTHER, workers=Workers(1))
    monkeypatch.undo()


def test_a_copy_goes_on_where_it_was(source, place, tmp_path, monkeypatch):
    rechunk(source, tmp_path / "whole", OTHER)
    stopped(source, place, monkeypatch, 2)
    row = place / "ledger" / "states" / "c.0.0.0"
    objects = [place / LAYERS / f"c.{shard}.0.{slot}" for shard in (0, 1) for slot in range(3)]
    before = [path.stat().st_mtime_ns for path in (row, *objects)]
    assert rechunk(source, place, OTHER)
    assert [path.stat().st_mtime_ns for path in (row, *objects)] == before
    assert contents(place) == contents(tmp_path / "whole")


def test_a_committed_shard_that_lost_an_object_is_done_again(source, place, tmp_path, monkeypatch, caplog):
    rechunk(source, tmp_path / "whole", OTHER)
    stopped(source, place, monkeypatch, 2)
    (place / LAYERS / "c.1.0.0").unlink()
    assert rechunk(source, place, OTHER)
    assert "is copied again: shard 1 (target_hidden_states/c.1.0.0 is missing)" in caplog.text
    assert contents(place) == contents(tmp_path / "whole")


def test_an_unfinished_copy_is_told_from_an_unfinished_precompute(source, place, tmp_path, monkeypatch):
    stopped(source, place, monkeypatch, 1)
    with pytest.raises(ValueError, match=r"its copy was interrupted .* run dspark-store rechunk again"):
        open_cache(place)
    assert "rechunk" in refusal(place, tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (CopySettings(), "codec (there 'fast', asked for 'default')"),
        (CopySettings("fast", 5, 4), "shard_size (there 2, asked for 4)"),
        (CopySettings("fast", 6, 2), "chunk_tokens (there 5, asked for 6)"),
        (CopySettings("fast", 5, 2, (2,)), "layer_ids (there (2, -1, 5), asked for (2,))"),
    ],
)
def test_a_copy_with_other_settings_is_refused_by_what_differs(source, place, monkeypatch, settings, words):
    stopped(source, place, monkeypatch, 1)
    before = contents(place)
    assert words in refusal(source, place, settings)
    assert contents(place) == before


def test_a_copy_of_another_store_is_refused(source, place, tmp_path, monkeypatch):
    stopped(source, place, monkeypatch, 1)
    before = contents(place)
    other = build_store(tmp_path / "other", fields={"manifest": MANIFEST, "store_id": "f" * 32}).path
    assert "copy of another store" in refusal(other, place, OTHER)
    again = build_store(tmp_path / "again", fields={"manifest": MANIFEST}, spoiled=2).path
    assert "other content" in refusal(again, place, OTHER)
    assert contents(place) == before


def test_what_is_no_copy_is_left_alone(source, place, tmp_path):
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    store = build_store(tmp_path / "other").path
    before = contents(tmp_path)
    for other, words in ((store, "no copy"), (place, "thesis.tex"), (tmp_path / "file", "is a file")):
        assert words in refusal(source, other)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("where", ["", "sub", ".."])
def test_a_copy_stands_apart_from_its_source(source, where):
    assert "stand apart" in refusal(source, source / where)


@pytest.mark.parametrize("until", ["tokens", "states"])
def test_a_growing_source_is_refused(tmp_path, until):
    source = build_store(tmp_path / "source", until=until).path
    assert "incomplete" in refusal(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "name",
    [
        "index/supervised/c.0",
        "index/digest/c.0.0",
        f"{IDS}/c.1.0",
        f"{LAYERS}/c.1.0.0",
        f"{LAYERS}/c.2.0.1",
        f"{LAST}/c.0.0.0",
        "target/lm_head/weight/c.0.0",
    ],
)
def test_damage_of_the_source_is_named_and_what_is_committed_stays(source, place, name):
    flip(source / name, 12)
    before = contents(source)
    with pytest.raises(DamagedStoreError, match=r"source is damaged.*dspark-store verify") as error:
        rechunk(source, place, OTHER)
    assert name.rpartition("/")[0] in str(error.value)
    assert contents(source) == before
    assert not place.exists() or phase_of(place) != "complete"
    flip(source / name, 12)
    assert rechunk(source, place, OTHER)
    assert_copied(source, place)


def test_states_of_other_tokens_are_damage(source, place, monkeypatch):
    real = copy_shards._tokens_digest
    monkeypatch.setattr(copy_shards, "_tokens_digest", lambda *given: "0" * 32 if given[1].start else real(*given))
    with pytest.raises(DamagedStoreError, match="computed from other tokens"):
        rechunk(source, place, CopySettings())


@pytest.mark.parametrize(
    ("what", "told"),
    [("states", r"object target_\w*hidden_states/.* reads back other than"), ("tokens", "read back other")],
)
def test_what_does_not_read_back_is_not_committed(source, place, what, told, monkeypatch):
    real, step = CodecChain.encode, open_cache(source).schema.chunk_tokens

    def encode(self, chunk):
        is_states = chunk.ndim == 2 and len(chunk) == step  # and not the target's tables
        if (is_states if what == "states" else chunk.ndim == 1) and chunk.dtype != np.uint8:
            chunk = chunk.copy()
            chunk.flat[0] ^= 1
        return real(self, chunk)

    monkeypatch.setattr(CodecChain, "encode", encode)
    with pytest.raises(DamagedStoreError, match=told):
        rechunk(source, place, CopySettings(shard_size=7))
    ledger = token_ledger(LocalStorage(place))
    if what == "states":
        assert state_ledger(LocalStorage(place), open_cache(source).schema).committed() == []
        assert ledger.committed() == [0]
    else:
        assert not place.exists()


def test_a_full_disk_is_refused_before_anything_is_written(source, place, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 900)
    assert "no space: about" in refusal(source, place)
    assert not place.parent.exists()


def test_a_disk_that_fills_up_is_told_and_what_is_committed_stays(source, place, monkeypatch):
    def publish(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy_shards, "publish_states", publish)
    with pytest.raises(OSError, match=r"no space is left for .*; what is committed stays"):
        rechunk(source, place, OTHER)
    monkeypatch.undo()
    assert rechunk(source, place, OTHER)
    assert_copied(source, place)


def test_a_false_start_leaves_nothing(source, place, monkeypatch):
    def write(*args, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(copy_shards, "write_token_shard", write)
    with pytest.raises(OSError, match="Input/output"):
        rechunk(source, place, OTHER)
    assert not place.parent.exists()


def test_a_copy_that_another_job_writes_is_refused(source, place, monkeypatch):
    stopped(source, place, monkeypatch, 1)
    with StoreLock(LocalStorage(place)), pytest.raises(BlockingIOError, match="is being written by process"):
        rechunk(source, place, OTHER)


def test_a_job_that_lost_its_copy_commits_no_more(source, place, monkeypatch):
    real = copy_shards._read_back

    def lose(task, *rest):
        real(task, *rest)
        (task.destination.root / LOCK_KEY).write_text("somebody else")

    monkeypatch.setattr(copy_shards, "_read_back", lose)
    with pytest.raises(BlockingIOError, match="taken over by another job"):
        rechunk(source, place, OTHER, workers=Workers(1))
    assert state_ledger(LocalStorage(place), open_cache(source).schema).committed() == []


def test_a_source_that_changes_while_it_is_copied_is_noticed(source, place, tmp_path, monkeypatch):
    monkeypatch.setattr(copy_shards, "read_seal", lambda storage: "another")
    with pytest.raises(ValueError, match="was changed while it was being copied"):
        rechunk(source, place, OTHER)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (CopySettings(chunk_tokens=0), "chunk_tokens must be >= 1"),
        (CopySettings(shard_size=-1), "shard_size must be >= 1"),
        (CopySettings(layers=(2, 7)), "layer 7 is not in the source"),
        (CopySettings(layers=()), "one or more"),
    ],
)
def test_impossible_settings_are_refused(source, place, settings, words):
    assert words in refusal(source, place, settings)
    assert not place.parent.exists()


def test_weights_that_do_not_read_back_stop_the_copy(source, place, monkeypatch):
    monkeypatch.setattr("dspark_store.inspection.rechunk._same_weights", lambda *tables: False)
    with pytest.raises(DamagedStoreError, match="target weights"):
        rechunk(source, place, OTHER)
