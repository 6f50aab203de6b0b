"""Indices of windows kept on disk: named by what they follow from, written whole or not at all."""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.megatron.windows import WindowIndices, WindowSettings, build_indices

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
_ARRAYS = ("document", "sample", "shuffle")
_DIGESTS = "digests.json"
_WORK_NAME = re.compile(r"\.[0-9a-f]{64}\.\w+")
_ABANDONED_AFTER = 24 * 3600.0  # seconds


def cache_key(lengths: NDArray[np.int64], settings: WindowSettings) -> str:
    """Return the name of the indices: SHA-256, in hex, of all that decides them, the lengths of the units included.

    Where the corpus lies is not in it, and neither are its token ids: the indices do not depend on them.
    """
    facts = {
        "version": CACHE_VERSION,
        "lengths_sha256": hashlib.sha256(np.ascontiguousarray(lengths, "<i8")).hexdigest(),
        **asdict(settings),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def cached_indices(lengths: NDArray[np.int64], settings: WindowSettings, directory: Path | None) -> WindowIndices:
    """Return the indices, from the cache if it has them, else built and then kept there.

    Any number of processes may do so at once: a set of indices appears whole, under its final name, and the first to
    finish wins. Sets that are damaged are built again. Where `directory` cannot be written, the user's own cache
    directory is tried, and then nothing is kept; a warning says which.

    Args:
        lengths: int64, shape (units,): tokens in each unit.
        settings: see `WindowSettings`.
        directory: where the sets are kept; None keeps none.

    Raises:
        SourceError: the units hold no tokens.

    """
    if directory is None:
        return build_indices(lengths, settings)
    key = cache_key(lengths, settings)
    places = [place / key for place in (directory, user_cache_directory()) if place is not None]
    for place in places:
        found = _load(place)
        if found is not None:
            return found
    indices = build_indices(lengths, settings)
    for place in places:
        try:
            _save(place, indices)
        except OSError as error:
            logger.warning("%s cannot hold the indices of the windows: %s", place.parent, error.strerror or error)
        else:
            return indices
    logger.warning("the indices of the windows are kept nowhere, and are built again each time")
    return indices


def user_cache_directory() -> Path | None:
    """Return where this user's indices go when the directory of the corpus cannot be written; None without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "dspark-store" / "megatron"
    except RuntimeError:
        return None


def _load(place: Path) -> WindowIndices | None:
    """Return the indices of one set, mapped read-only, or None if it is not there or not what was written."""
    if not place.is_dir():
        return None
    try:
        digests = json.loads((place / _DIGESTS).read_text())
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
    except (OSError, ValueError, EOFError) as error:
        logger.warning("%s cannot be read and is built again: %s", place, error)
        shutil.rmtree(place, ignore_errors=True)
        return None
    if digests != {name: _digest(array) for name, array in arrays.items()}:
        logger.warning("%s is damaged and is built again", place)
        shutil.rmtree(place, ignore_errors=True)
        return None
    return WindowIndices(**arrays)


def _save(place: Path, indices: WindowIndices) -> None:
    """Write one set beside its place, then move it there; OSError if that cannot be."""
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        work.chmod(0o755)  # others who read the corpus may read these too
        arrays = {name: getattr(indices, name) for name in _ARRAYS}
        for name, array in arrays.items():
            np.save(work / f"{name}.npy", array, allow_pickle=False)
        digests = {name: _digest(array) for name, array in arrays.items()}
        (work / _DIGESTS).write_text(json.dumps(digests))  # what a power failure tears, the digests show
        _move(work, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Remove what processes that were killed left behind."""
    for left in directory.glob(".*.*"):
        if not _WORK_NAME.fullmatch(left.name):  # the directory may be the user's, with other files in it
            continue
        with contextlib.suppress(OSError):  # its process may be removing it just now
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(left, ignore_errors=True)


def _move(work: Path, place: Path) -> None:
    try:
        work.rename(place)
    except OSError:
        if not place.is_dir():  # else another process was first, and its set is the same
            raise


def _digest(array: NDArray[np.integer]) -> str:
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
