"""Hugging Face datasets, from the hub or from disk."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.rows import BESIDE, HARMLESS, NUMBERS, RowData, choose_columns, without_null_keys
from dspark_store.sources.source import SourceError

_ROWS_A_BATCH = 1000
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"


class HubRows:
    """The rows of one split of a dataset, memory-mapped by the library `datasets`.

    The content hash is over the rows' values, so that it does not depend on how and where the library keeps them.
    """

    def __init__(
        self,
        name: str,
        *,
        split: str | None,
        subset: str | None = None,
        columns: Mapping[str, str] = MappingProxyType({}),
        text_column: str | None = None,
    ) -> None:
        """Load the split and read it once, for its SHA-256.

        Args:
            name: a name on the hub, or a directory that `save_to_disk` wrote.
            split: the split's name; None for `train` or the only one.
            subset: the name of the configuration.
            columns: the columns that stand for our names.
            text_column: the only column that is read.

        Raises:
            SourceError: there is no such dataset or split, or it has no column of conversations or tokens.
            ImportError: the extra `hf` is not installed.

        """
        self._name = name
        dataset = _load(name, split, subset)
        chosen = choose_columns(f"dataset {name}", dataset.column_names, columns, text_column)
        self._dataset = dataset.select_columns(chosen).with_format(None)
        unread = [column for column in dataset.column_names if column not in {*chosen, *HARMLESS}]
        self.unread: dict[str, int] = {column: _filled(dataset, column) for column in unread}
        beside = {columns.get(name, name) for name in BESIDE[1:]} & set(chosen)
        digest, digest_beside = hashlib.sha256(), hashlib.sha256()
        for batch in self._dataset.iter(_ROWS_A_BATCH):
            for row in _objects(batch):
                later = {name: row.pop(name) for name in beside}
                digest.update(_line(row))
                digest_beside.update(_line(later))
        self.content_sha256 = digest.hexdigest()
        self.beside_sha256 = digest_beside.hexdigest() if beside else None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def where(self, row: int) -> str:
        """Return the dataset and the row, counted from 1."""
        return f"{self._name}, row {row + 1}"

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows as objects."""
        return [
            cast("dict[str, JsonValue]", without_null_keys(cast(JsonValue, row), NUMBERS))
            for row in _objects(self._dataset[list(rows)])
        ]

    def close(self) -> None:
        """Do nothing: the data is memory-mapped."""


def is_saved_dataset(path: Path) -> bool:
    """Tell whether a directory is one that `save_to_disk` of the library `datasets` wrote."""
    return any((path / name).is_file() for name in (SAVED_DATASET, SAVED_SPLITS))


def _load(name: str, split: str | None, subset: str | None) -> Any:  # noqa: ANN401 - datasets has no types
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is a dataset; reading it needs the package datasets: pip install 'dspark-store[hf]'"
        ) from error
    try:
        if Path(name).is_dir() and is_saved_dataset(Path(name)):
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, subset)
    except Exception as error:  # the library, its back ends and the network raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"dataset {name} cannot be loaded ({reason[:300]})") from error
    if not isinstance(loaded, dict):
        return loaded
    wanted = split or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if wanted not in loaded:
        raise SourceError(f"dataset {name} has no split {wanted!r}; it has {', '.join(map(str, loaded))}")
    return loaded[wanted]


def _filled(dataset: Any, column: str) -> int:  # noqa: ANN401 - datasets has no types
    """Return how many rows have a value in a column."""
    batches = dataset.select_columns([column]).with_format("arrow").iter(_ROWS_A_BATCH)
    return len(dataset) - sum(int(batch.column(0).null_count) for batch in batches)


def _line(row: dict[str, JsonValue]) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode() + b"\n"


def _objects(columns: dict[str, list[JsonValue]]) -> list[dict[str, JsonValue]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
