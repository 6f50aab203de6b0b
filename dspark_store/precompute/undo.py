"""Taking back what a failed run has made, where nothing of it can be gone on with."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark_store.format.metadata import ROOT_KEY, has_store
from dspark_store.format.schema import COLUMNS
from dspark_store.format.storage import LocalStorage
from dspark_store.sources.source import SourceError
from dspark_store.writers.tokens import token_ledger

OWN_FOLDERS = ("ledger", *COLUMNS, "index", "target")
"""Folders at the top of a store, in the order in which they are removed: without its ledger a store is empty."""


def is_unfinished_beginning(root: Path) -> bool:
    """Tell whether a folder without a ``zarr.json`` holds what a run that was killed while it began leaves behind.

    That is nothing but the metadata of a store's arrays: no row, no object.
    """
    files = [path for name in OWN_FOLDERS for path in (root / name).rglob("*") if not path.is_dir()]
    return all(path.name == ROOT_KEY or path.name.startswith(f".{ROOT_KEY}.") for path in files)


class TargetError(ValueError):
    """The target cannot be loaded or captured as asked; another one, or other settings, make another store."""


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
def new_store_undone(storage: LocalStorage) -> Iterator[None]:
    """Remove a store that the block has begun when it fails and leaves nothing to go on with.

    So it is before the first shard of tokens is committed; and when a row of the data or the target cannot be used,
    because a mended one is another, for which the store would be refused. The caller holds the store's lock.
    """
    if has_store(storage):
        yield
        return
    try:
        yield
    except BaseException as error:
        if isinstance(error, SourceError | TargetError) or not token_ledger(storage).committed():
            _remove_store(storage)
        raise


def _remove_store(storage: LocalStorage) -> None:
    for name in OWN_FOLDERS:
        shutil.rmtree(storage.path(name), ignore_errors=True)
    with contextlib.suppress(OSError):
        storage.sweep()
        storage.delete(ROOT_KEY)
