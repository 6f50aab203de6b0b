"""Bytes to come are known well enough to refuse a disk that is too small, and only such a one."""

import pytest

from dspark_store import open_cache
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import CopySettings, CopySize, copy_record, refuse_small_disk, shares_tables
from dspark_store.inspection.rechunk import rechunk
from tests.inspection.rechunk.copies import MANIFEST
from tests.stores import Shape, build_store

SHAPE = Shape(seq_length=256, shard_size=4, chunk_tokens=64, hidden_size=32)
LENGTHS = (200, 3, 256, 100, 64, 65, 40, 150, 256)


def stored_bytes(root):
    """Return what a store's objects take, links once, without its metadata."""
    files = {path.stat().st_ino: path.stat().st_size for path in root.rglob("c.*")}
    return sum(files.values())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("sized") / "source"
    return build_store(place, shape=SHAPE, lengths=LENGTHS, fields={"manifest": MANIFEST}).path


@pytest.mark.parametrize(
    "settings",
    [
        CopySettings(),
        CopySettings(shard_size=2),
        CopySettings(codec="none"),
        CopySettings(codec="none", chunk_tokens=1),
    ],
    ids=str,
)
def test_what_is_to_come_is_about_what_comes(source, tmp_path, settings):
    cache = open_cache(source)
    size = CopySize(cache, copy_record(cache.record, "seal", settings))
    shards = range(size.record.schema.tokens.num_shards)
    rechunk(source, tmp_path / "copy", settings)
    assert size.coming(shards, shards) == pytest.approx(stored_bytes(tmp_path / "copy"), rel=0.15)


def test_what_is_there_does_not_come_again(source):
    cache = open_cache(source)
    size = CopySize(cache, copy_record(cache.record, "seal", CopySettings()))
    parts = [size.coming([0, 1, 2], [0, 1, 2]), size.coming([], [0, 1, 2]), size.coming([], [1]), size.coming([], [])]
    assert parts == sorted(parts, reverse=True)
    assert len(set(parts)) == 4


def test_fewer_layers_take_less(source):
    cache = open_cache(source)
    whole, part = (
        CopySize(cache, copy_record(cache.record, "seal", settings)).raw([0, 1, 2])
        for settings in (CopySettings(), CopySettings(layers=(2,)))
    )
    assert (whole, part) == (sum(LENGTHS) * 3 * 64, sum(LENGTHS) * 2 * 64)


def test_a_disk_is_too_small_by_one_byte(monkeypatch, source):
    storage = LocalStorage(source)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
    refuse_small_disk(storage, 1000)
    with pytest.raises(ValueError, match=r"about 1.00 KB are still to be written to .*, 1.00 KB are free"):
        refuse_small_disk(storage, 1001)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_is_known_by_its_bytes(tied, tmp_path):
    assert shares_tables(build_store(tmp_path, tied=tied).record) == tied
