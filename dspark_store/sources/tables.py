"""Tables of rows: parquet files, read by row group, and Hugging Face datasets, from the hub or from disk."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.jsonl import JsonlRows, Spool
from dspark_store.sources.rows import BESIDE, HARMLESS, NUMBERS, RowData, Rows, choose_columns, without_null_keys
from dspark_store.sources.source import SourceError

if TYPE_CHECKING:
    import pyarrow.parquet as pq


PARQUET_MAGIC = b"PAR1"
_PARQUET_ROWS = 256
_DATASET_ROWS = 1000
_JUMPS_BEFORE_SPOOL = 8
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"


class ParquetRows(Rows):
    """The rows of one parquet file.

    In order, one row group is in memory at a time. Read in another order, the rows are first written as JSON lines
    to a temporary file, since each would else cost a row group.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], text_column: str | None) -> None:
        """Read the footer, and the file once for its SHA-256.

        Raises:
            SourceError: the file is not parquet, is damaged, or has no column of conversations or tokens.
            ImportError: the extra `parquet` is not installed.

        """
        self.name, self._path = str(path), path
        self._group = -1
        self._table: Any = None
        self._jumps = 0
        self._spooled: JsonlRows | None = None
        self._file: pq.ParquetFile | None = None
        file = self._opened()
        names = file.schema_arrow.names
        self._columns = choose_columns(str(path), names, columns, text_column)
        self.unread = {name: self._filled(name) for name in names if name not in {*self._columns, *HARMLESS}}
        counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self._starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        with path.open("rb") as raw:
            self.content_sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        self.close()

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._starts[-1])

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows as objects; SourceError if a row group cannot be read."""
        if self._spooled is None and self._jumps > _JUMPS_BEFORE_SPOOL:
            self._spooled = self._as_lines()
        if self._spooled is not None:
            return self._spooled.take(rows)
        taken: list[RowData] = []
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        for group, members in groupby(zip(groups.tolist(), rows, strict=True), itemgetter(0)):
            places = [row - int(self._starts[group]) for _, row in members]
            taken += _without_nulls(self._row_group(group).take(places).to_pylist())
        return taken

    def close(self) -> None:
        """Close the file and forget the row group at hand."""
        self._table, self._group = None, -1
        if self._file is not None:
            self._file.close()
            self._file = None

    def _filled(self, name: str) -> int:
        """Return how many rows have a value in a column: by the footer, if it says so."""
        file = self._opened()
        groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        own = [chunk for chunk in chunks if chunk.path_in_schema == name]
        if own and all(chunk.statistics is not None and chunk.statistics.has_null_count for chunk in own):
            return sum(int(chunk.statistics.num_values) for chunk in own)
        try:
            batches = [int(batch.column(0).null_count) for batch in file.iter_batches(_PARQUET_ROWS, columns=[name])]
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return int(file.metadata.num_rows) - sum(batches)

    def _row_group(self, group: int) -> Any:  # noqa: ANN401 - pyarrow has no types
        if group != self._group:
            self._jumps += group not in (self._group + 1, 0)
            try:
                self._table = self._opened().read_row_group(group, columns=self._columns)
            except (OSError, ValueError) as error:
                raise self._damaged(error) from error
            self._group = group
        return self._table

    def _as_lines(self) -> JsonlRows:
        spool = Spool(self._path, compressed=False)
        try:
            for batch in self._opened().iter_batches(_PARQUET_ROWS, columns=self._columns):
                for row in _without_nulls(batch.to_pylist()):
                    spool.write(json.dumps(row).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        self.close()
        return JsonlRows(self._path, spool)

    def _opened(self) -> "pq.ParquetFile":
        if self._file is None:
            try:
                import pyarrow.parquet as pq
            except ImportError as error:
                raise ImportError(
                    f"{self._path} is a parquet file; reading it needs the package pyarrow: "
                    "pip install 'dspark-store[parquet]'"
                ) from error
            try:
                self._file = pq.ParquetFile(self._path)
            except (OSError, ValueError) as error:
                raise self._damaged(error) from error
        return self._file

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(f"{self._path} cannot be read as parquet ({' '.join(str(error).split())})")


def _without_nulls(rows: Iterable[dict[str, JsonValue]]) -> list[RowData]:
    return [cast("dict[str, JsonValue]", without_null_keys(row, NUMBERS)) for row in rows]


class HubRows(Rows):
    """The rows of one split of a dataset, memory-mapped by the library `datasets`.

    The content hash is over the rows' values, so that it does not depend on how and where the library keeps them.
    """

    def __init__(
        self,
        name: str,
        columns: Mapping[str, str],
        text_column: str | None,
        *,
        split: str | None,
        subset: str | None = None,
    ) -> None:
        """Load the split and read it once, for its SHA-256.

        Args:
            name: a name on the hub, or a directory that `save_to_disk` wrote.
            columns: the columns that stand for our names.
            text_column: the only column that is read.
            split: the split's name; None for `train` or the only one.
            subset: the name of the configuration.

        Raises:
            SourceError: there is no such dataset or split, or it has no column of conversations or tokens.
            ImportError: the extra `hf` is not installed.

        """
        self.name = name
        dataset = _load(name, split, subset)
        chosen = choose_columns(f"dataset {name}", dataset.column_names, columns, text_column)
        self._dataset = dataset.select_columns(chosen).with_format(None)
        unread = [column for column in dataset.column_names if column not in {*chosen, *HARMLESS}]
        self.unread = {column: _filled(dataset, column) for column in unread}
        beside = {columns.get(name, name) for name in BESIDE[1:]} & set(chosen)
        digest, digest_beside = hashlib.sha256(), hashlib.sha256()
        for batch in self._dataset.iter(_DATASET_ROWS):
            for row in _objects_of_columns(batch):
                later = {name: row.pop(name) for name in beside}
                digest.update(_line(row))
                digest_beside.update(_line(later))
        self.content_sha256 = digest.hexdigest()
        self.beside_sha256 = digest_beside.hexdigest() if beside else None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows as objects."""
        return _without_nulls(_objects_of_columns(self._dataset[list(rows)]))


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
    batches = dataset.select_columns([column]).with_format("arrow").iter(_DATASET_ROWS)
    return len(dataset) - sum(int(batch.column(0).null_count) for batch in batches)


def _line(row: dict[str, JsonValue]) -> bytes:
    return json.dumps(row, sort_keys=True, default=str).encode() + b"\n"


def _objects_of_columns(columns: dict[str, list[JsonValue]]) -> list[dict[str, JsonValue]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
