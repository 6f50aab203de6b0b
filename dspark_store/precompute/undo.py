"""Taking back what a failed run has made, where nothing of it can be gone on with."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from dspark_store.format.ledger import Ledger, state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY, has_store
from dspark_store.format.schema import COLUMNS, IDS, LAST, LAYERS, MASK, SHARD_SOURCES, StoreSchema, object_key
from dspark_store.format.storage import LocalStorage
from dspark_store.format.token_shards import sources_key
from dspark_store.sources.source import SourceError
from dspark_store.writers.lock import LostLockError, check_lock
from dspark_store.writers.recovery import sweep_uncommitted

_MAY_PASS = (OSError, MemoryError, RuntimeError)  # torch's out of memory and broken connections are of the last
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_log = logging.getLogger(__name__)
_NAMES_SHOWN = 5
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ImportError)
OWN_FOLDERS = ("ledger", *COLUMNS, "index", "target")
"""Folders at the top of a store, in the order in which they are removed: without its ledger a store is empty."""


def is_unfinished_beginning(root: Path) -> bool:
    """Tell whether a folder without a ``zarr.json`` holds what a run that was killed while it began leaves behind.

    That is nothing but the metadata of a store's arrays, and the copy of the root's: no row, no object.
    """
    files = [path for name in OWN_FOLDERS for path in (root / name).rglob("*") if not path.is_dir()]
    metadata = (ROOT_KEY, root.joinpath(COPY_KEY).name)
    return all(path.name in metadata or path.name.startswith(tuple(f".{name}." for name in metadata)) for path in files)


class UnsupervisedError(SourceError):
    """No sample has a supervised token: the store, which has no states yet, is of no use."""


class TargetError(ValueError):
    """The target cannot be loaded or captured as asked; another one, or other settings, make another store."""


@contextmanager
def full_disk_told(place: Path, what_stays: str) -> Iterator[None]:
    """Say of a disk that fills up in the block what it was full for, what is not lost, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise OSError(error.errno, f"no space is left for {place}; {what_stays}") from error


@contextmanager
def new_folders_undone(root: Path) -> Iterator[None]:
    """Remove the folders that were made for a store when the block fails and has left nothing in them."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def new_store_undone(storage: LocalStorage, holder: str) -> Iterator[None]:
    """Remove a store that the block has begun when it fails and leaves nothing to go on with.

    So it is before the first shard of tokens is committed; and when a row of the data or the target is refused, because
    a mended one is another, for which the store would be refused. A store that was there already is removed for an
    UnsupervisedError alone. ``holder`` is the caller, whose lock the store has: once it is another's, all that is there
    is too.
    """
    begun_here = not has_store(storage)
    try:
        yield
    except BaseException as error:
        useless = isinstance(error, UnsupervisedError)
        if begun_here and not useless:
            useless = _would_come_again(error) or not token_ledger(storage).committed()
        if useless and _holds(storage, holder):
            _remove_store(storage)
        raise


def _holds(storage: LocalStorage, holder: str) -> bool:
    try:
        check_lock(storage, holder)
    except (LostLockError, OSError):  # a disk that does not tell whose the store is gets the benefit of the doubt
        return False
    return True


def _would_come_again(error: BaseException) -> bool:
    """Tell whether an error refuses the data or the target, and so would meet the same run another time.

    It is raised for whatever stood in the way, so what it was raised from decides: want of memory, of the disk, of a
    network or of a peer may pass. Libraries that load a target have classes of their own for these; there only what is
    known to be a refusal is one.
    """
    if not isinstance(error, SourceError | TargetError):
        return False
    causes: list[BaseException] = []
    cause = error.__cause__
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    if any(isinstance(cause, _MAY_PASS) and not isinstance(cause, RecursionError) for cause in causes):
        return False
    return isinstance(error, SourceError) or all(isinstance(cause, _REFUSALS) for cause in causes)


def retract_broken(storage: LocalStorage, record: StoreRecord) -> list[str]:
    """Take back the commits of shards whose objects are missing, or of another size than was committed.

    So are those that a job made too late, when another one had pushed it aside and swept what it had not yet committed.
    Tokens are looked at while there is a source to make them from again, which is until they are settled; states
    always, since a repaired store may have them while its tokens are not settled. Only the holder of the store's lock
    may call it. Returns what is wrong with each of the shards. DamagedStoreError when a ledger row cannot be read.
    """
    broken: list[str] = []
    if record.phase == "tokens":
        expected = partial(_token_sizes, record.schema)
        broken += _retract(storage, token_ledger(storage), (IDS, MASK, SHARD_SOURCES), expected)
    expected = partial(_state_sizes, record.schema)
    return broken + _retract(storage, state_ledger(storage, record.schema), (LAYERS, LAST), expected)


def _retract(
    storage: LocalStorage,
    ledger: Ledger,
    columns: Sequence[str],
    expected: Callable[[int, np.ndarray], Mapping[str, int | None]],
) -> list[str]:
    keys = [f"{column}/{name}" for column in columns for name in storage.list(column)]
    sizes = {key: storage.path(key).stat().st_size for key in keys}
    broken: list[str] = []
    for shard in ledger.committed():
        for key, size in expected(shard, ledger.row(shard)).items():
            found = sizes.get(key)
            if found is None or size not in (None, found):
                ledger.retract(shard)
                broken.append(f"shard {shard} ({key} {'is missing' if found is None else f'has {found} bytes'})")
                break
    return broken


def _token_sizes(schema: StoreSchema, shard: int, row: np.ndarray) -> dict[str, int | None]:
    """Return the bytes of each object of a shard's tokens by its ledger row; None where the row does not hold them."""
    sizes: dict[str, int | None] = {object_key(IDS, shard): int(row[0, 0]), object_key(MASK, shard): int(row[1, 0])}
    return {**sizes, sources_key(shard): None} if schema.sources else sizes


def _state_sizes(schema: StoreSchema, shard: int, row: np.ndarray) -> dict[str, int | None]:
    """Return the bytes of each object of a shard's states by its ledger row."""
    return {item.key(shard): int(nbytes) for item, (nbytes, _) in zip(schema.state_objects, row, strict=True)}


def _remove_store(storage: LocalStorage) -> None:
    for name in OWN_FOLDERS:
        shutil.rmtree(storage.path(name), ignore_errors=True)
    with contextlib.suppress(OSError):
        storage.sweep()
        storage.delete(ROOT_KEY)


def clean(storage: LocalStorage, record: StoreRecord) -> None:
    """Remove what former runs have left that is no part of the store, or only half of one."""
    broken = [] if record.complete else retract_broken(storage, record)
    if broken:
        more = f" and {len(broken) - _NAMES_SHOWN} more" if len(broken) > _NAMES_SHOWN else ""
        names = ", ".join(broken[:_NAMES_SHOWN])
        _log.warning("committed shards whose objects are not all there are done again: %s%s", names, more)
    swept = sweep_uncommitted(storage, record)
    if swept:
        _log.info("removed %d leftovers of an interrupted run", swept)
