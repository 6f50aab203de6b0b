"""Disks that fill up, fail or cannot be written: one line, and with space again the same bytes."""

import errno
import os
import shutil
from pathlib import Path

import pytest

import dspark_store as ds
from dspark_store.cli.main import main as cli
from dspark_store.format.files import LocalObjectWriter
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.__main__ import main
from tests.precompute.jobs import contents, refused


def fail_at(monkeypatch, step, key, code):
    """Make the disk fail for good once the object at the end of ``key`` comes to a step: write or finish."""
    original = getattr(LocalObjectWriter, step)
    failing: list[str] = []

    def failing_step(writer, *args):
        if failing or key.endswith(f"store/{writer.key}"):
            failing.append(key)
            raise OSError(code, os.strerror(code))
        return original(writer, *args)

    monkeypatch.setattr(LocalObjectWriter, step, failing_step)
    return failing


BEFORE_THE_FIRST_COMMIT = [
    ("write", "store/.writer.lock"),
    ("write", "store/input_ids/zarr.json"),
    ("finish", "out/store/zarr.json"),
    ("write", "store/loss_mask/c.0.0"),
    ("finish", "store/ledger/tokens/c.0.0.0"),
]
LATER = [
    ("write", "store/loss_mask/c.1.0"),
    ("finish", "store/index/length/c.0"),
    ("write", "store/target/embed_tokens/weight/c.0.0"),
    ("write", "store/target_hidden_states/c.0.0.0"),
    ("finish", "store/target_last_hidden_states/c.1.0.0"),
    ("write", "store/ledger/states/c.2.0.0"),
    ("finish", "store/index/objects/c.0.0.0"),
]


@pytest.mark.parametrize(("step", "key"), BEFORE_THE_FIRST_COMMIT)
def test_a_disk_that_fills_up_before_anything_is_committed_is_left_clean(job, tmp_path, monkeypatch, capsys, step, key):
    failed = fail_at(monkeypatch, step, key, errno.ENOSPC)
    line = refused(job(), capsys)
    assert failed
    assert f"no space is left for {tmp_path / 'out' / 'store'}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "key"), LATER)
def test_a_disk_that_fills_up_later_leaves_a_store_that_resumes_to_the_same_bytes(
    job, tmp_path, store, monkeypatch, capsys, step, key
):
    output = tmp_path / "out" / "store"
    with monkeypatch.context() as patch:
        failed = fail_at(patch, step, key, errno.ENOSPC)
        assert "go on with --resume" in refused(job(), capsys)
    assert failed
    assert list(LocalStorage(output).temporaries()) == []
    with pytest.raises(ValueError, match="incomplete"):
        ds.open_cache(output)
    assert main(job("--resume")) == 0
    assert contents(output) == contents(store)


def test_a_disk_error_while_writing_is_one_line(job, store, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "store"
    with monkeypatch.context() as patch:
        fail_at(patch, "write", "store/target_hidden_states/c.1.0.1", errno.EIO)
        assert "Input/output error" in refused(job(), capsys)
    assert ds.existing_shard_indices(output) <= {0}  # whose commit may still have been under way
    assert main(job("--resume")) == 0
    assert contents(output) == contents(store)


def test_a_place_that_cannot_be_made_is_one_line(job, tmp_path, monkeypatch, capsys):
    def read_only(path, *args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    line = refused(job(), capsys, at_once=True)
    assert "Read-only file system" in line
    assert str(tmp_path / "out") in line
    assert list(tmp_path.iterdir()) == []


def test_an_empty_place_that_cannot_be_written_is_one_line(job, tmp_path, monkeypatch, capsys):
    def read_only(writer, root, key):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{root}/{key}")

    monkeypatch.setattr(LocalObjectWriter, "__init__", read_only)
    assert "Read-only file system" in refused(job(output=tmp_path), capsys, at_once=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["16k", "96k", "224k", "320k"])
def test_a_small_disk_fills_up_and_a_larger_one_goes_on(job, store, mounted, monkeypatch, capsys, size):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 10**12)
    output = mounted(f"size={size}") / "store"
    assert "no space is left for" in refused(job(output=output), capsys)
    mounted("size=64m")
    assert main(job("--resume", output=output)) == 0
    assert contents(output) == contents(store)


def test_a_read_only_disk_is_one_line(job, mounted, capsys):
    place = mounted("ro")
    assert "Read-only file system" in refused(job(output=place / "store"), capsys, at_once=True)
    assert "Read-only file system" in refused(job(output=place), capsys, at_once=True)


@pytest.mark.parametrize("folder", ["input_ids", "ledger"])
def test_nothing_is_written_through_a_folder_that_is_a_link(job, store, tmp_path, capsys, folder):
    outside, output = tmp_path / "outside", tmp_path / "out" / "store"
    outside.mkdir()
    output.mkdir(parents=True)
    (output / folder).symlink_to(outside)
    assert f"{output / folder} is a link: nothing is written or removed through it" in refused(job(), capsys)
    assert list(outside.iterdir()) == []
    assert (output / folder).is_symlink()


def test_a_resume_removes_nothing_through_a_link(job, store, tmp_path, capsys):
    outside, output = tmp_path / "outside", tmp_path / "out" / "store"
    shutil.copytree(store, output)
    for key in ("target_hidden_states/c.1.0.0", "target_last_hidden_states/c.1.0.0"):
        LocalStorage(output).delete(key)
    assert cli(["repair", str(output)]) == 0
    (output / "target_hidden_states").rename(outside)
    (output / "target_hidden_states").symlink_to(outside)
    (outside / "c.9.0.0").write_bytes(b"precious")
    before = sorted(path.name for path in outside.iterdir())
    assert "target_hidden_states is a link" in refused(job("--resume"), capsys)
    assert sorted(path.name for path in outside.iterdir()) == before
