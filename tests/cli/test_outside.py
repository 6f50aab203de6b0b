"""Whatever a root says, and whatever in a store is a link, no file outside of it is written, renamed or removed."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspark_store.cli.main import main
from dspark_store.format.arrays import pack_array
from dspark_store.format.manifest import ATTRIBUTE, parse_record, seal_digest
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY, record_nodes
from dspark_store.format.schema import metadata_bytes
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from tests.inspection.faults import copy_store
from tests.stores import build_store

type Json = Any

OUTSIDE = "../outside"
PATHS = (
    OUTSIDE,
    f"{OUTSIDE}/deeper",
    "../../outside",
    "{base}/outside",
    f"index/../{OUTSIDE}",
    f"target/embed_tokens/weight/../../../{OUTSIDE}",
    "index//length",
    "linked",
    "linked/deeper",
    ".",
    "..",
    "",
    "/",
    "a\0b",
    "input_ids",
    "ledger/states",
    "target/other/weight",
)
FOLDERS = ("input_ids", "target_hidden_states", "ledger", "ledger/states", "index", "index/length", "target")
COMMANDS = (
    "info {store}",
    "info {store} --json",
    "head {store}",
    "verify {store} --threads 1",
    "repair {store} --threads 1 --dry-run",
    "repair {store} --threads 1",
    "verify {store} --threads 1 --quick",
    "stats {store} --threads 1 --output {base}/stats",
    "diff {store} {good}",
    "rechunk {store} {base}/copy --codec fast --threads 1",
    "rechunk {good} {store} --codec fast --threads 1",
)

_REMOVING = {"os.remove": (1,), "os.rmdir": (1,), "os.mkdir": (2,), "shutil.rmtree": (1,)}
_CHANGING = {"os.truncate": (), "os.chmod": (2,), "os.chown": (3,), "os.utime": (3,), "os.setxattr": ()}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes every path that this process opens for writing, renames, removes or changes while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.touched: list[str] = []
        self._opening = threading.local()
        self._open = os.open
        sys.addaudithook(self._hear)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Stand in for `os.open`, whose event does not tell the folder that a name is relative to."""
        self._opening.folder = dir_fd
        try:
            return self._open(path, flags, mode, dir_fd=dir_fd)
        finally:
            self._opening.folder = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if flags & _WRITING:
                follows = not flags & (os.O_NOFOLLOW | os.O_EXCL)
                self._note(arguments[0], getattr(self._opening, "folder", None), follows=follows)
        elif event in _REMOVING:
            self._note(arguments[0], *(arguments[at] for at in _REMOVING[event]), follows=False)
        elif event in _CHANGING and not isinstance(arguments[0], int):
            self._note(arguments[0], *(arguments[at] for at in _CHANGING[event]), follows=True)
        elif event == "os.rename":
            self._note(arguments[0], arguments[2], follows=False)
            self._note(arguments[1], arguments[3], follows=False)
        elif event == "os.link":
            self._note(arguments[1], arguments[3], follows=False)
        elif event == "os.symlink":
            self._note(arguments[1], arguments[2], follows=False)

    def _note(self, path: Any, folder: int | None = None, *, follows: bool) -> None:
        place = Path(os.fsdecode(path))
        if folder is not None and folder >= 0:
            place = Path(f"/proc/self/fd/{folder}").readlink() / place
        self.touched.append(os.path.realpath(place) if follows else f"{os.path.realpath(place.parent)}/{place.name}")


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watch.open)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield watch


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    watch.touched.clear()
    watch.on = True
    try:
        yield
    finally:
        watch.on = False


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A good store, one that grows, and a copy."""
    place = tmp_path_factory.mktemp("stores")
    settled = build_store(place / "good", codec="none", tied=True, sources=("a", "b"), bias=True).path
    growing = build_store(place / "growing", until="tokens").path
    captured = build_store(place / "captured", until="states", without_shards=(1,)).path
    rechunk(build_store(place / "plain").path, place / "copied", CopySettings("fast"))
    for command in COMMANDS[:-1]:  # libraries make folders of their own when they are first called
        main(command.format(store=settled, good=settled, base=place).split())
    return [settled, growing, captured, place / "copied"]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


paths = st.sampled_from(PATHS)
counts = st.integers(-1, 40)
shapes = st.lists(counts, max_size=3)
checksums = st.sampled_from([digest(b""), digest(b"precious"), digest(pack_array(np.zeros(8))), "", "x" * 32])


def _put(*place: str) -> Callable[[Json, Json], None]:
    """Return what puts a value at a place of the root's attributes."""

    def put(attributes: Json, value: Json) -> None:
        for name in place[:-1]:
            if not isinstance(attributes.get(name), dict):
                attributes[name] = {}
            attributes = attributes[name]
        attributes[place[-1]] = value

    return put


def _merged(name: str) -> Callable[[Json, Json], None]:
    return lambda attributes, value: _put(name)(attributes, {**(attributes.get(name) or {}), **value})


EDITS: dict[str, tuple[Callable[[Json, Json], None], st.SearchStrategy[Json]]] = {
    "weights": (_merged("weights"), st.dictionaries(paths, shapes, min_size=1, max_size=3)),
    "checksums": (_merged("checksums"), st.dictionaries(paths, checksums, min_size=1, max_size=3)),
    "sources": (_put("layout", "sources"), st.lists(paths, min_size=2, max_size=4)),
    "codec": (_put("layout", "codec"), paths),
    "dtype": (_put("layout", "dtype"), paths),
    "layers": (_put("layout", "num_layers"), counts),
    "shard size": (_put("layout", "shard_size"), counts),
    "samples": (_put("layout", "num_samples"), counts),
    "layer ids": (_put("layout", "layer_ids"), st.lists(counts | paths, max_size=4)),
    "copied from": (_merged("copied_from"), st.dictionaries(st.sampled_from(["store_id", "seal", "codec"]), paths)),
    "root copy": (_put("root_copy"), paths),
    "store id": (_put("store_id"), paths),
    "phase": (_put("phase"), st.sampled_from(["tokens", "states", "complete", OUTSIDE])),
    "manifest": (_merged("manifest"), st.dictionaries(st.sampled_from(["target_model", "train_data_path"]), paths)),
    "target config": (_put("target_config"), st.dictionaries(paths, paths, max_size=2)),
    "head": (_put("head"), st.dictionaries(paths, paths, max_size=2)),
    "producers": (_put("producers"), st.lists(st.dictionaries(paths, paths, max_size=2), max_size=2)),
}
edits = st.sampled_from(sorted(EDITS)).flatmap(lambda name: st.tuples(st.just(name), EDITS[name][1]))
links = st.tuples(st.sampled_from(FOLDERS), st.sampled_from(["outside", "outside/deeper", "store/index"]))
rows = st.tuples(
    st.sampled_from(["ledger/tokens/c.0.0.0", "ledger/states/c.0.0.0", "ledger/states/c.1.0.0"]),
    st.lists(st.integers(0, 2**64 - 1), min_size=0, max_size=12),
)
strays = st.sampled_from(["input_ids/c.9.0", "ledger/c.0", "index/.x.tmp", ".zarr.json.0123.tmp", "notes"])


def with_base(value: Json, base: Path) -> Json:
    if isinstance(value, dict):
        return {with_base(name, base): with_base(inner, base) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_base(inner, base) for inner in value]
    return value.replace("{base}", str(base)) if isinstance(value, str) else value


def edit_root(store: Path, base: Path, changes: list[tuple[str, Json]]) -> None:
    """Edit the root, and seal it anew together with the nodes that it asks for, as anybody can."""
    root = json.loads((store / ROOT_KEY).read_bytes())
    attributes = root["attributes"][ATTRIBUTE]
    for name, value in changes:
        EDITS[name][0](attributes, with_base(value, base))
    try:
        nodes = dict(record_nodes(parse_record(attributes, "a test")))
        for path, document in nodes.items():
            place = Path(os.path.normpath(store / path))
            if place.is_relative_to(store):  # elsewhere an attacker has none
                place.mkdir(parents=True, exist_ok=True)
                (place / ROOT_KEY).write_bytes(metadata_bytes(document))
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError):
        found = {path.parent.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob(ROOT_KEY)}
        nodes = {path: json.loads(text) for path, text in found.items() if path != "."}
    attributes["seal"] = seal_digest(attributes, nodes)
    for key in (ROOT_KEY, COPY_KEY):
        (store / key).write_bytes(metadata_bytes(root))


def lay_out(base: Path) -> dict[str, tuple[bytes, int]]:
    """Make files of somebody's with names that a store has; return what they are."""
    for folder in ("outside", "outside/deeper", "outside/states", "outside/length"):
        (base / folder).mkdir()
        for name in ("c.0", "c.0.0", "c.0.0.0", "c.7.0.0", "zarr.json", "root.json", ".c.0.0123.tmp", "notes"):
            (base / folder / name).write_bytes(b"precious")
    return state_of(base / "outside")


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = list(folder.rglob("*"))
    return {str(path): (b"" if path.is_dir() else path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def run_all(base: Path, good: Path, watch: Watch) -> None:
    """Run every command on the store at ``base``, and check what they touched; no surprise, and no traceback."""
    allowed = tuple(f"{base}/{name}" for name in ("store", "copy", "stats"))
    before = state_of(base / "outside")
    for command in COMMANDS:
        words = [word.format(store=base / "store", base=base, good=good) for word in command.split()]
        with watching(watch):
            code = main(words)
        assert code in (0, 1, 2), (command, code)
        strange = [path for path in watch.touched if not path.startswith(allowed) and "/__pycache__" not in path]
        assert strange == [], (command, strange)
        assert state_of(base / "outside") == before, command


@example(0, [("weights", {OUTSIDE: [0, 8]}), ("checksums", {OUTSIDE: digest(b"")})], [], [], [])
@example(0, [("weights", {"{base}/outside": [0, 8]}), ("checksums", {"{base}/outside": digest(b"")})], [], [], [])
@example(0, [], [("ledger/states", "outside")], [], [])
@example(1, [], [("input_ids", "outside")], [], ["input_ids/c.9.0"])
@given(
    st.integers(0, 3),
    st.lists(edits, max_size=4),
    st.lists(links, max_size=2),
    st.lists(rows, max_size=2),
    st.lists(strays, max_size=2),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_path_outside_of_a_store_is_touched(stores, watch, which, changes, linked, ledger, stray):
    with tempfile.TemporaryDirectory() as place:
        base = Path(place).resolve()
        store = copy_store(stores[which], base / "store")
        lay_out(base)
        for key, values in ledger:
            if (store / key).exists():
                (store / key).unlink()
                (store / key).write_bytes(pack_array(np.array(values, np.uint64)))
        edit_root(store, base, changes)
        for key in stray:
            (store / key).parent.mkdir(parents=True, exist_ok=True)
            (store / key).write_bytes(b"stray")
        (store / "linked").symlink_to(base / "outside")
        for folder, target in linked:
            if (store / folder).is_dir() and not (store / folder).is_symlink():
                shutil.rmtree(store / folder)
                (store / folder).symlink_to(base / target)
        run_all(base, stores[0], watch)
