"""Stores of a stranger: links, what is no file, and names that are not of this format."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dspark_store.cli.main import main
from dspark_store.format.schema import COLUMNS
from tests.inspection.faults import copy_store
from tests.readers.test_foreign import rewrite
from tests.stores import build_store

type Contents = dict[str, bytes]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("good") / "store", codec="none", tied=True, sources=("a", "b")).path


@pytest.fixture
def store(good: Path, tmp_path: Path) -> Path:
    return copy_store(good, tmp_path / "store")


def contents(folder: Path) -> Contents:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def told(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """Run a command, which must end with ``code``; return all that it printed."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def as_snapshot(store: Path, blobs: Path) -> None:
    """Make of a store what a hub's cache has: every object is a link to a blob."""
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in store.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))


def test_a_snapshot_of_links_is_a_store_like_any_other(store, tmp_path, capsys):
    as_snapshot(store, tmp_path / "blobs")
    objects = sum(path.is_symlink() for path in store.rglob("*"))
    assert f"{objects} objects are links to files outside of the store" in told(capsys, 0, "verify", store)
    for command in ("verify", "info"):
        assert main([command, str(store), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["links"] == {"out": objects, "folders": []}
    assert "objects are links to files outside of the store" in told(capsys, 0, "info", store)
    assert "nothing to repair" in told(capsys, 0, "repair", store)
    told(capsys, 0, "head", store)
    told(capsys, 0, "rechunk", store, tmp_path / "copy", "--codec", "fast")
    assert "0 problems" in told(capsys, 0, "verify", tmp_path / "copy")


def test_a_snapshot_is_repaired_and_its_blobs_stay(store, tmp_path, capsys):
    blobs = tmp_path / "blobs"
    as_snapshot(store, blobs)
    (store / "target_hidden_states" / "c.1.0.2").unlink()  # is the last hidden state too
    (store / "target" / "lm_head" / "weight" / "c.0.0").unlink()  # is the embedding too
    before = contents(blobs)
    told(capsys, 0, "repair", store)
    assert contents(blobs) == before
    assert "0 problems" in told(capsys, 0, "verify", store)
    assert not (store / "target_hidden_states" / "c.1.0.2").is_symlink()


@pytest.mark.parametrize("folder", ["ledger", "ledger/states", "index", "target/lm_head", *COLUMNS])
def test_nothing_is_written_through_a_folder_that_is_a_link(folder, store, tmp_path, capsys):
    outside = tmp_path / "outside"
    (store / folder).rename(outside)
    (store / folder).symlink_to(outside)
    (outside / "c.7.0.0").write_bytes(b"precious")
    (outside / ".c.7.0.0.tmp").write_bytes(b"precious")
    (outside / "zarr.json").write_bytes(b"damaged")
    before = contents(outside)
    assert f"{folder} is a link to a folder: nothing is written through it" in told(capsys, 1, "verify", store)
    for options in (["--dry-run"], []):
        assert f"{store / folder} is a link: nothing is written" in told(capsys, 2, "repair", store, *options)
        assert contents(outside) == before


def test_a_store_that_is_reached_through_a_link_is_repaired(store, tmp_path, capsys):
    (tmp_path / "link").symlink_to(store)
    (store / "index" / "length" / "c.0").unlink()
    told(capsys, 0, "repair", tmp_path / "link")
    assert "0 problems" in told(capsys, 0, "verify", tmp_path / "link")


def test_only_names_of_objects_are_removed(store, capsys):
    kept = [store / "input_ids" / name for name in ("notes.txt", "c.1.0.bak", "c", "c.01.0")]
    gone = [store / "input_ids" / name for name in ("c.9.0", "c.0.0.0")] + [store / "index" / ".c.0.ab.tmp"]
    for path in (*kept, *gone):
        path.write_bytes(b"precious")
    out = told(capsys, 0, "repair", store)
    assert "left         input_ids/notes.txt: no name of an object, so move it elsewhere yourself" in out
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


def much_too_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 5 << 30)


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": a_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "5 GB": much_too_large,
}
PLACES = (
    "zarr.json",
    "ledger/states/root.json",
    "loss_mask/zarr.json",
    "index/objects/c.0.0.0",
    "index/length/c.0",
    "ledger/states/c.1.0.0",
    "ledger/sources/c.1.0",
    "target/lm_head/weight/c.0.0",
    "input_ids/c.1.0",
    "target_hidden_states/c.1.0.0",
)
PAIRS = [([*ODD][(at + more) % len(ODD)], place) for at, place in enumerate(PLACES) for more in (0, 3)]


@pytest.fixture
def watchdog() -> Iterator[None]:
    """End the process where a command waits for ever, as a FIFO would make it."""
    timer = threading.Timer(300, os._exit, (70,))
    timer.start()
    yield
    timer.cancel()


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize(("what", "place"), PAIRS)
def test_what_is_no_regular_file_is_damage_that_every_command_tells_in_a_line(what, place, store, capsys):
    (store / place).unlink()
    ODD[what](store / place)
    assert place in told(capsys, 1, "verify", store)
    for command in ("info", "head", "repair --dry-run"):
        name, *options = command.split()
        capsys.readouterr()
        assert main([name, str(store), *options]) in (0, 1, 2)
        lines = capsys.readouterr().err.split("\n")
        assert sum("error" in line or "Traceback" in line for line in lines) <= 1, lines


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize("what", [what for what in ODD if what not in ("5 GB", "a link to nothing")])
def test_a_column_of_another_tool_is_read_from_files_only(what, tmp_path, capsys):
    store = build_store(tmp_path / "store")
    rewrite(store, "loss_mask", (1, 20), compressors=None)
    (store.path / "loss_mask" / "c" / "1" / "0").unlink()
    ODD[what](store.path / "loss_mask" / "c" / "1" / "0")
    assert "loss_mask/c/1/0 is a" in told(capsys, 1, "verify", store.path)
    told(capsys, 1, "head", store.path)


def test_bytes_of_another_file_are_never_shown_as_tokens(tmp_path, capsys):
    store = build_store(tmp_path / "store")
    rewrite(store, "input_ids", (1, 20), compressors=None)
    secret = tmp_path / "secret"
    secret.write_bytes(np.full(20, 123454321, "<i4").tobytes())
    (store.path / "input_ids" / "c" / "1" / "0").unlink()
    (store.path / "input_ids" / "c" / "1" / "0").symlink_to(secret)
    shown = told(capsys, 1, "head", store.path, "--samples", "1")
    shown += told(capsys, 1, "stats", store.path, "--output", tmp_path / "stats")
    shown += told(capsys, 1, "rechunk", store.path, tmp_path / "copy")
    assert "123454321" not in shown
    assert b"123454321" not in b"".join(contents(tmp_path / "stats").values())


@pytest.mark.parametrize("folder", ["input_ids", "ledger", "target_hidden_states"])
def test_a_copy_is_not_written_through_a_link(folder, good, tmp_path, capsys):
    outside, copy = tmp_path / "outside", tmp_path / "copy"
    outside.mkdir()
    copy.mkdir()
    (copy / folder).symlink_to(outside)
    assert f"{copy / folder} is a link" in told(capsys, 2, "rechunk", good, copy)
    assert list(outside.iterdir()) == []


def test_a_copy_that_was_begun_is_not_gone_on_with_through_a_link(good, tmp_path, capsys):
    outside, copy = tmp_path / "outside", tmp_path / "copy"
    told(capsys, 0, "rechunk", good, copy)
    told(capsys, 0, "verify", copy)
    for gone in ("target_hidden_states/c.1.0.0", "target_hidden_states/c.1.0.2", "target_last_hidden_states/c.1.0.0"):
        (copy / gone).unlink()
    told(capsys, 0, "repair", copy)  # takes the shard back
    (copy / "target_hidden_states").rename(outside)
    (copy / "target_hidden_states").symlink_to(outside)
    (outside / "c.9.0.0").write_bytes(b"precious")
    before = contents(outside)
    assert f"{copy / 'target_hidden_states'} is a link" in told(capsys, 2, "rechunk", good, copy)
    assert contents(outside) == before


def test_a_copy_into_its_own_source_is_seen_through_links(good, store, tmp_path, capsys):
    (tmp_path / "link").symlink_to(store)
    for destination in (tmp_path / "link", tmp_path / "link" / "inside"):
        assert "must stand apart from its source" in told(capsys, 2, "rechunk", store, destination)
    (tmp_path / "new").mkdir()
    (tmp_path / "into").symlink_to(tmp_path / "new")
    told(capsys, 0, "rechunk", good, tmp_path / "into")
    assert "0 problems" in told(capsys, 0, "verify", tmp_path / "new")
