"""Files of a store that are no objects of its columns."""

from __future__ import annotations

from dspark_store.inspection.other_files import files_beside
from tests.stores import build_store


def groups_of(store):
    return {group.name: group for group in files_beside(store.storage)}


def test_index_ledger_target_and_metadata_are_counted_apart(tmp_path):
    store = build_store(tmp_path / "s")
    groups = groups_of(store)
    assert (groups["index"].files, groups["ledger"].files) == (5, 6)
    metadata = [*store.path.rglob("zarr.json"), *store.path.rglob("root.json")]
    assert groups["metadata"].files == len(metadata)
    assert groups["metadata"].bytes == sum(path.stat().st_size for path in metadata)
    assert groups["unfinished"].files == groups["other"].files == 0


def test_a_tied_head_takes_nothing(tmp_path):
    tied, own = build_store(tmp_path / "tied", tied=True), build_store(tmp_path / "own")
    assert (groups_of(tied)["target"].files, groups_of(own)["target"].files) == (1, 2)


def test_what_does_not_belong_is_told_apart(tmp_path):
    store = build_store(tmp_path / "s")
    (store.path / "index" / ".c.0.ab.tmp").write_bytes(b"12345")
    (store.path / "notes").mkdir()
    (store.path / "notes" / "read.me").write_bytes(b"123")
    groups = groups_of(store)
    assert (groups["unfinished"].bytes, groups["other"].bytes) == (5, 3)
