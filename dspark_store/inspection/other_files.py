"""The files of a store that are no objects of its columns: index, ledger, target, metadata."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import batched
from pathlib import Path, PurePosixPath

from dspark_store.format.metadata import COPY_KEY, ROOT_KEY
from dspark_store.format.schema import COLUMNS
from dspark_store.format.storage import LocalStorage

METADATA, UNFINISHED, OTHER = "metadata", "unfinished", "other"
_FOLDERS = ("index", "ledger", "target")
_FILES_A_TASK, _THREADS = 256, 16


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files of one kind: how many there are and their bytes, a file with several names once."""

    name: str
    files: int
    bytes: int


def files_beside(storage: LocalStorage) -> tuple[FileGroup, ...]:
    """Return the files of a store that are no objects of its columns.

    They are grouped as ``index``, ``ledger``, ``target`` (its vocabulary tables), ``metadata`` (every ``zarr.json``
    and the root's copy), ``unfinished`` (what writers have not yet made visible there) and ``other``. The columns'
    folders, which may hold hundreds of thousands of objects, are not listed; what interrupted writers left in them is
    not counted.
    """
    files = [*_walk(storage.root), *((METADATA, f"{storage.root / name / ROOT_KEY}") for name in COLUMNS)]
    groups = {name: [0, 0] for name in (*_FOLDERS, METADATA, UNFINISHED, OTHER)}
    seen: set[tuple[int, int]] = set()
    for name, identity, nbytes in _sizes(files):
        if identity not in seen:
            seen.add(identity)
            groups[name][0] += 1
            groups[name][1] += nbytes
    return tuple(FileGroup(name, files, nbytes) for name, (files, nbytes) in groups.items())


def _walk(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (group, path) of the files of a store that stand in no column's folder; no link to a folder is followed."""
    for directory, folders, names in os.walk(root):
        place = Path(directory).relative_to(root)
        if not place.parts:
            folders[:] = [folder for folder in folders if folder not in COLUMNS]
        for name in names:
            yield _group_of(name, "".join(place.parts[:1])), f"{directory}/{name}"


def _group_of(name: str, folder: str) -> str:
    if name.startswith(".") and name.endswith(".tmp"):
        return UNFINISHED
    if name in (ROOT_KEY, PurePosixPath(COPY_KEY).name):
        return METADATA
    return folder if folder in _FOLDERS else OTHER


def _sizes(files: Sequence[tuple[str, str]]) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Yield (group, what identifies the file, bytes) of the files that are still there."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stat") as pool:
        for part in pool.map(_sizes_of, batched(files, _FILES_A_TASK)):
            yield from part


def _sizes_of(files: Sequence[tuple[str, str]]) -> list[tuple[str, tuple[int, int], int]]:
    sizes = []
    for group, path in files:
        try:
            found = Path(path).stat()
        except OSError as error:  # a writer may have replaced it since it was listed; a link may lead nowhere
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            continue
        sizes.append((group, (found.st_dev, found.st_ino), found.st_size))
    return sizes
