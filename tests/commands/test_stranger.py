"""Stores of a stranger: links, what is no file, and names that are not of this format."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dspark_store.cli import main
from dspark_store.format.schema import COLUMNS
from tests.inspection.faults import copy_store
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
@pytest.mark.parametrize("command", ["repair", "repair --dry-run"])
def test_nothing_is_written_through_a_folder_that_is_a_link(folder, command, store, tmp_path, capsys):
    outside = tmp_path / "outside"
    (store / folder).rename(outside)
    (store / folder).symlink_to(outside)
    (outside / "c.7.0.0").write_bytes(b"precious")
    (outside / ".c.7.0.0.tmp").write_bytes(b"precious")
    (outside / "zarr.json").write_bytes(b"damaged")
    before = contents(outside)
    assert f"{folder} is a link to a folder: nothing is written through it" in told(capsys, 1, "verify", store)
    (name, *options) = command.split()
    assert f"{store / folder} is a link: nothing is written" in told(capsys, 2, name, store, *options)
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


@pytest.fixture
def watchdog() -> Iterator[None]:
    """End the process where a command waits for ever, as a FIFO would make it."""
    timer = threading.Timer(300, os._exit, (70,))
    timer.start()
    yield
    timer.cancel()


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("place", PLACES)
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
