"""Which rows the user means: a file, several, a glob, a directory or a dataset."""

import glob
import hashlib
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from os import PathLike, fspath
from pathlib import Path
from stat import S_ISREG

from dspark_store.sources.jsonl import GZIP, ZSTD, JsonlRows, JsonRows, Spool, compression_of, unpack
from dspark_store.sources.rows import RowData, Rows
from dspark_store.sources.source import SourceError
from dspark_store.sources.tables import PARQUET_MAGIC, HubRows, ParquetRows, is_saved_dataset

LINE_SUFFIXES = (".jsonl", ".ndjson")
COMPRESSED_SUFFIXES = {".gz": GZIP, ".gzip": GZIP, ".zst": ZSTD, ".zstd": ZSTD}
DATA_SUFFIXES = (*LINE_SUFFIXES, ".json", ".parquet", *COMPRESSED_SUFFIXES, ".csv", ".tsv", ".txt")
HUB_PREFIX = "hf://"
LARGEST_DOCUMENT = 1024 * 1024 * 1024
_OPEN_FILES = 64

type DataPath = str | PathLike[str]


def open_rows(
    data: DataPath | Sequence[DataPath],
    *,
    split: str | None = None,
    subset: str | None = None,
    columns: Mapping[str, str] | None = None,
    text_column: str | None = None,
) -> Rows:
    """Count and hash the rows that the user means.

    Args:
        data: a file (`.jsonl` and `.ndjson` of one JSON object a line; `.parquet`; anything else is one JSON
            document, a list of rows or one row; each of the JSON kinds may be compressed by gzip or zstd), a glob, a
            directory of parquet files, JSON Lines or a saved dataset, the name of a dataset on the hub, or several of
            these. A glob stands for its files in sorted order.
        split: the name of a dataset's split; files have none.
        subset: the configuration of a dataset on the hub.
        columns: the columns of columnar files that stand for our names.
        text_column: the only column of theirs that is read.

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: something is not a regular file, is damaged, or there are no rows.
        ImportError: a package that the kind of file needs is not installed.

    """
    given = [data] if isinstance(data, str | PathLike) else list(data)
    if not given:
        raise SourceError("no data was given; expected a file or a list of files")
    chosen = columns or {}, text_column
    parts = [_open(name, split, subset, *chosen) for item in given for name in _expanded(item)]
    rows = parts[0] if len(parts) == 1 else ManyRows(parts)
    if not len(rows):
        raise SourceError(
            f"{', '.join(fspath(item) for item in given)} has no rows; expected at least one conversation"
        )
    return rows


def are_json(rows: Rows) -> bool:
    """Tell whether all rows stand in JSON files, and none in tables."""
    return all(map(are_json, rows.parts)) if isinstance(rows, ManyRows) else isinstance(rows, JsonlRows | JsonRows)


class ManyRows(Rows):
    """The rows of several files, one after the other. At most 64 of the files are open at a time."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        """Hash the parts' hashes in order."""
        self.parts = parts
        self.unread = sum((Counter(part.unread) for part in parts), Counter())
        self._ends = list(accumulate(map(len, parts)))
        self._open: dict[int, None] = {}
        self.content_sha256 = hashlib.sha256("".join(part.content_sha256 for part in parts).encode()).hexdigest()
        beside = [part.beside_sha256 or "" for part in parts]
        self.beside_sha256 = hashlib.sha256(" ".join(beside).encode()).hexdigest() if any(beside) else None

    def __len__(self) -> int:
        """Return the number of rows of all parts."""
        return self._ends[-1]

    def where(self, row: int) -> str:
        """Return the file and the place in it."""
        part, own = self._place(row)
        return self.parts[part].where(own)

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given rows, reading each file once."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for position, row in enumerate(rows):
            part, own = self._place(row)
            wanted.setdefault(part, []).append((position, own))
        taken: list[RowData] = [b""] * len(rows)
        for part, places in wanted.items():
            self._keep_few_open(part)
            for (position, _), data in zip(places, self.parts[part].take([own for _, own in places]), strict=True):
                taken[position] = data
        return taken

    def close(self) -> None:
        """Close all files."""
        for part in self.parts:
            part.close()
        self._open.clear()

    def _place(self, row: int) -> tuple[int, int]:
        part = bisect_right(self._ends, row)
        return part, row - (self._ends[part - 1] if part else 0)

    def _keep_few_open(self, part: int) -> None:
        self._open.pop(part, None)
        self._open[part] = None
        if len(self._open) > _OPEN_FILES:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self.parts[oldest].close()


def _expanded(data: DataPath) -> list[str]:
    name = fspath(data)
    if not name.strip():
        raise SourceError(f"a data path is {name!r}; expected the name of a file")
    path = Path(name)
    if path.is_dir() and not is_saved_dataset(path):
        return _in_folder(path)
    if not path.exists() and glob.has_magic(name):
        found = glob.glob(name, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = sorted(file for file in found if not Path(file).is_dir())
        if not files:
            raise FileNotFoundError(f"{name}: no file matches; expected files of conversations")
        return files
    return [name]


def _in_folder(path: Path) -> list[str]:
    tables, lines = sorted(map(str, path.glob("*.parquet"))), sorted(map(str, filter(_holds_lines, path.iterdir())))
    if not tables and not lines:
        raise SourceError(f"{path} is a directory without parquet files or JSON Lines; expected files of conversations")
    if tables and lines:
        raise SourceError(f"{path} has both parquet files and JSON Lines; say which by a glob, such as {path}/*.jsonl")
    return tables or lines


def _holds_lines(path: Path) -> bool:
    inner = Path(path.stem) if path.suffix.lower() in COMPRESSED_SUFFIXES else path
    return inner.suffix.lower() in LINE_SUFFIXES and path.is_file()


def _open(
    name: str, split: str | None, subset: str | None, columns: Mapping[str, str], text_column: str | None
) -> Rows:
    path = Path(name)
    if name.startswith(HUB_PREFIX) or (not path.exists() and _may_be_on_the_hub(name)):
        return HubRows(name.removeprefix(HUB_PREFIX), columns, text_column, split=split, subset=subset)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected a .jsonl, .json or .parquet file of conversations")
    if path.is_dir():
        return HubRows(name, columns, text_column, split=split)
    if not S_ISREG(path.stat().st_mode):
        raise SourceError(f"{path} is not a regular file, and rows are read by offset; write them to a file first")
    return _open_file(path, columns, text_column)


def _open_file(path: Path, columns: Mapping[str, str], text_column: str | None) -> Rows:
    suffix = path.suffix.lower()
    promised = COMPRESSED_SUFFIXES.get(suffix)
    with path.open("rb") as file:
        head = file.read(len(PARQUET_MAGIC))
    found = compression_of(path)
    if promised is not None and found != promised and head:
        raise SourceError(f"{path} is not compressed as its name says; name it by what it holds")
    if suffix == ".parquet":
        return ParquetRows(path, columns, text_column)
    if head == PARQUET_MAGIC:
        raise SourceError(f"{path} is a parquet file; name it .parquet")
    spool = unpack(path, found) if found is not None else None
    if (Path(path.stem).suffix.lower() if promised else suffix) in LINE_SUFFIXES:
        return JsonlRows(path, spool)
    return JsonRows(path, _content(path, spool))


def _content(path: Path, spool: Spool | None) -> bytes:
    size = path.stat().st_size if spool is None else os.fstat(spool.file.fileno()).st_size
    if size > LARGEST_DOCUMENT:
        raise SourceError(f"{path} is one JSON document of {size:,} bytes; write one row per line and name it .jsonl")
    return path.read_bytes() if spool is None else spool.file.read()


def _may_be_on_the_hub(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and "." not in parts and Path(name).suffix.lower() not in DATA_SUFFIXES
