"""Folders of a store, opened one inside the other: nothing is written, renamed or removed through a link."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def key_parts(key: str) -> list[str]:
    """Return the names that a key consists of; ValueError for one that need not stay below the store's root."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise ValueError(
            f"{key[:100]!r} is no key of a store: expected names joined by '/', none of them empty, '.' or '..'"
        )
    return parts


@contextmanager
def opened_folder(root: Path, key: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of a key; give its descriptor, and the key's name in it.

    The root may be a link; of the folders below it none is followed, and what is done by the descriptor stays in the
    folder that was opened, whatever takes its place meanwhile. With ``make``, missing folders are made, each durable in
    the one above it. NotADirectoryError for a link or a file in a folder's place.
    """
    *folders, name = key_parts(key)
    if make:
        make_directory(root)
    place, descriptor = root, os.open(root, _FOLDER)
    try:
        for folder in folders:
            inner = _enter(descriptor, place, folder, make=make)
            os.close(descriptor)
            place, descriptor = place / folder, inner
        yield descriptor, name
    except OSError as error:  # names are relative to the descriptor, which says nothing to a user
        if isinstance(error.filename, str):
            error.filename = str(place / error.filename)
        if isinstance(error.filename2, str):
            error.filename2 = str(place / error.filename2)
        raise
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, each durable in the one above it."""
    missing = []
    place = directory
    while not place.is_dir():
        missing.append(place)
        place = place.parent
    directory.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        descriptor = os.open(made.parent, _FOLDER)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _enter(above: int, place: Path, folder: str, *, make: bool) -> int:
    flags = _FOLDER | os.O_NOFOLLOW
    try:
        try:
            return os.open(folder, flags, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another writer was quicker
                os.mkdir(folder, dir_fd=above)
            os.fsync(above)
            return os.open(folder, flags, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        what = "a link" if (place / folder).is_symlink() else "no folder"
        raise NotADirectoryError(
            f"{place / folder} is {what}: nothing is written or removed through it; put the folder itself there"
        ) from error
