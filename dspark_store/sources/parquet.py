"""Parquet files of rows, read by row group."""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.rows import HARMLESS, NUMBERS, RowData, choose_columns, without_null_keys
from dspark_store.sources.source import SourceError
from dspark_store.sources.spool import Spool

if TYPE_CHECKING:
    import pyarrow.parquet as pq

PARQUET_MAGIC = b"PAR1"
_ROWS_A_BATCH = 256
_JUMPS_BEFORE_SPOOL = 8


class ParquetRows:
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
        self._path = path
        self._group = -1
        self._table: Any = None
        self._jumps = 0
        self._spool: Spool | None = None
        self._offsets = array("q")
        self._file: pq.ParquetFile | None = None
        file = self._opened()
        names = file.schema_arrow.names
        self._columns = choose_columns(str(path), names, columns, text_column)
        self.unread: dict[str, int] = {
            name: self._filled(name) for name in names if name not in {*self._columns, *HARMLESS}
        }
        counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self._starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        with path.open("rb") as raw:
            self.content_sha256 = hashlib.file_digest(raw, "sha256").hexdigest()
        self.beside_sha256: str | None = None
        self.close()

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._starts[-1])

    def where(self, row: int) -> str:
        """Return the file and the row, counted from 1."""
        return f"{self._path}, row {row + 1}"

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows as objects; SourceError if a row group cannot be read."""
        if self._spool is None and self._jumps > _JUMPS_BEFORE_SPOOL:
            self._write_spool()
        if self._spool is not None:
            return [self._line(self._spool, row) for row in rows]
        taken: list[RowData] = []
        first = 0
        while first < len(rows):  # runs of consecutive rows
            last = first + 1
            while last < len(rows) and rows[last] == rows[last - 1] + 1:
                last += 1
            taken.extend(self._run(rows[first], rows[last - 1] + 1))
            first = last
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
            batches = [int(batch.column(0).null_count) for batch in file.iter_batches(_ROWS_A_BATCH, columns=[name])]
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        return int(file.metadata.num_rows) - sum(batches)

    def _run(self, start: int, stop: int) -> list[RowData]:
        taken: list[RowData] = []
        while start < stop:
            group = int(np.searchsorted(self._starts, start, side="right")) - 1
            end = min(stop, int(self._starts[group + 1]))
            table = self._row_group(group)
            taken.extend(_objects(table.slice(start - int(self._starts[group]), end - start)))
            start = end
        return taken

    def _row_group(self, group: int) -> Any:  # noqa: ANN401 - pyarrow has no types
        if group != self._group:
            self._jumps += group not in (self._group + 1, 0)
            try:
                self._table = self._opened().read_row_group(group, columns=self._columns)
            except (OSError, ValueError) as error:
                raise self._damaged(error) from error
            self._group = group
        return self._table

    def _write_spool(self) -> None:
        spool = Spool(self._path, compressed=False)
        position = 0
        try:
            for batch in self._opened().iter_batches(_ROWS_A_BATCH, columns=self._columns):
                for row in _objects(batch):
                    self._offsets.append(position)
                    position += spool.write(json.dumps(row).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error
        self._spool = spool
        self.close()

    def _line(self, spool: Spool, row: int) -> bytes:
        spool.file.seek(self._offsets[row])
        return spool.file.readline()

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


def _objects(table: Any) -> list[RowData]:  # noqa: ANN401 - a pyarrow table or batch
    return [cast("dict[str, JsonValue]", without_null_keys(row, NUMBERS)) for row in table.to_pylist()]
