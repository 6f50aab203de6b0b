"""Names: which shards are committed, and objects that no part of the store accounts for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dspark_store.format.arrays import array_keys
from dspark_store.format.damage import Part, Problem
from dspark_store.format.ledger import token_ledger
from dspark_store.format.metadata import COPY_KEY, ROOT_KEY
from dspark_store.format.schema import (
    COLUMNS,
    IDS,
    LAYERS,
    MASK,
    SHARD_SOURCES,
    STATE_LEDGER,
    TOKEN_LEDGER,
    object_key,
)
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.readers.checks.findings import StoreView

_NUMBERS = re.compile(r"c((?:\.(?:0|[1-9]\d*))+)")


@dataclass(frozen=True, slots=True)
class Links:
    """What of a store is links: ``out`` objects that lie outside of it, and the ``folders`` that are links."""

    out: int = 0
    folders: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return what a user should know of them."""
        objects = "1 object is a link" if self.out == 1 else f"{self.out:,} objects are links"
        lines = [f"{objects} to files outside of the store"] if self.out else []
        return lines + [f"{folder} is a link to a folder: nothing is written through it" for folder in self.folders]


def find_links(storage: Storage) -> Links:
    """Look for links below a local store's root, without following any."""
    if not isinstance(storage, LocalStorage):
        return Links()
    root = os.path.realpath(storage.root)
    out, folders, pending = 0, [], [root]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                entries = [entry for entry in found if entry.is_symlink() or entry.is_dir(follow_symlinks=False)]
        except OSError:  # what cannot be listed holds no object that could be read
            continue
        for entry in entries:
            if not entry.is_symlink():
                pending.append(entry.path)
            elif Path(entry.path).is_dir():
                folders.append(Path(entry.path).relative_to(root).as_posix())
            else:
                out += not os.path.realpath(entry.path).startswith(f"{root}/")
    return Links(out, tuple(sorted(folders)))


def is_object_name(name: str) -> bool:
    """Tell whether a name is one that objects have: ``c.`` and numbers."""
    return _NUMBERS.fullmatch(name) is not None


def known_shards(view: StoreView) -> Sequence[int]:
    """Return the shards that the store has, or, while its tokens are written, those that it has committed so far."""
    if view.record.phase != "tokens":
        return range(view.schema.tokens.num_shards)
    return token_ledger(view.storage).committed()


def check_strays(view: StoreView) -> Iterator[Problem]:
    """Yield every object in a directory of an array that the array does not have.

    Hidden files are left alone: writers in progress have them, and some file systems. Objects of shards that are not
    committed are no strays while the store grows.
    """
    for directory, belongs in _directories(view).items():
        for name in view.storage.list(directory):
            if (
                f"{directory}/{name}" != COPY_KEY
                and name != ROOT_KEY
                and not name.startswith(".")
                and not belongs(name)
            ):
                message = "belongs to no shard, layer or table of the store"
                yield Problem(Part.STRAY, f"{directory}/{name}", None, (), message)


def _directories(view: StoreView) -> dict[str, Callable[[str], bool]]:
    """Return, for each directory of an array, what tells whether a name in it is that of one of its objects."""
    schema, record = view.schema, view.record
    shards = None if record.phase == "tokens" else schema.tokens.num_shards
    directories: dict[str, Callable[[str], bool]] = {
        column: partial(_names_object, column, shards, schema.num_layers if column == LAYERS else 1)
        for column in COLUMNS
        if column not in view.foreign
    }
    for ledger in (TOKEN_LEDGER, STATE_LEDGER):
        directories[ledger] = partial(_names_object, ledger, shards, 1)
    if schema.sources:
        directories[SHARD_SOURCES] = partial(_names_object, SHARD_SOURCES, shards, 1)
    specs = {path: schema.weights(shape) for path, shape in record.weights.items()}
    if record.complete:  # before, an interrupted writer may have left the beginnings of the next phase
        specs |= {**schema.token_index(), **schema.final_index()}
    for path, spec in specs.items():
        directories[path] = frozenset(key.rpartition("/")[2] for key in array_keys(path, spec)).__contains__
    return directories


def _names_object(directory: str, shards: int | None, slots: int, name: str) -> bool:
    match = _NUMBERS.fullmatch(name)
    if match is None:
        return False
    shard, *rest = (int(number) for number in match.group(1)[1:].split("."))
    slot = rest[-1] if rest else 0
    flat = directory in (IDS, MASK, SHARD_SOURCES)
    expected = f"{directory}/c.{shard}.0" if flat else object_key(directory, shard, slot)
    return (shards is None or shard < shards) and slot < slots and f"{directory}/{name}" == expected
