"""Files of rows: JSON Lines read by offset, and JSON documents."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Protocol, cast

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.source import SourceError

LINE_SUFFIXES = (".jsonl", ".ndjson")


class RowFile(Protocol):
    """A file of rows that was read through once and now gives each of them by its number."""

    path: Path
    content_sha256: str

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def where(self, row: int) -> str:
        """Return the file and the place in it, for messages."""
        ...

    def read(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Yield the JSON text of the given rows, not yet checked.

        Raises:
            SourceError: the file is no longer the one that was read through.

        """
        ...


def open_rows(path: str | PathLike[str]) -> RowFile:
    """Read through a file once and return its rows.

    `.jsonl` and `.ndjson` files hold one JSON object a line; anything else is one JSON document, whose list is the
    rows, or whose object is the only row.

    Raises:
        FileNotFoundError: there is no such file.
        SourceError: the path is not a regular file, or the file has no rows or is no JSON document.

    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected a .jsonl or .json file of conversations")
    if path.is_dir():
        raise SourceError(f"{path} is a directory; expected a .jsonl or .json file of conversations")
    if not S_ISREG(path.stat().st_mode):
        raise SourceError(f"{path} is not a regular file, and rows are read by offset; write them to a file first")
    rows: RowFile = JsonlFile(path) if path.suffix.lower() in LINE_SUFFIXES else JsonFile(path)
    if not len(rows):
        raise SourceError(f"{path} has no rows; expected at least one conversation")
    return rows


class JsonlFile:
    """JSON Lines. Memory is 8 bytes a row, whatever the rows hold.

    Only `\\n` ends a line (a row may contain U+2028 and the like), and lines of white space are skipped.
    """

    def __init__(self, path: Path) -> None:
        """Read the file once, for its SHA-256 and the offset of each row."""
        self.path = path
        digest = hashlib.sha256()
        offsets = array("q")
        blank_before_row = array("q")
        with path.open("rb") as file:
            self._version = _file_version(file)
            position = 0
            for line in file:
                digest.update(line)
                if line.isspace():
                    blank_before_row.append(len(offsets))
                else:
                    offsets.append(position)
                position += len(line)
        self.content_sha256 = digest.hexdigest()
        self._offsets = np.array(offsets, dtype=np.int64)
        self._blank_before_row = np.array(blank_before_row, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._offsets)

    def where(self, row: int) -> str:
        """Return the file and the line, counted from 1 and with the blank ones."""
        blanks = int(np.searchsorted(self._blank_before_row, row, side="right"))
        return f"{self.path}, line {row + blanks + 1}"

    def read(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Yield the given lines; SourceError if the file has changed since their offsets were taken."""
        with self.path.open("rb") as file:
            if _file_version(file) != self._version:
                raise SourceError(f"{self.path} was changed while it was in use; start again")
            for row in rows:
                file.seek(int(self._offsets[row]))
                yield file.readline()


class JsonFile:
    """One JSON document, kept in memory: a list of rows, or one row."""

    def __init__(self, path: Path) -> None:
        """Parse the document; SourceError if it is not JSON."""
        self.path = path
        content = path.read_bytes()
        self.content_sha256 = hashlib.sha256(content).hexdigest()
        try:
            document = _parse(content) if content.strip() else []
        except SourceError as error:
            raise SourceError(
                f"{path}: {error}; expected one JSON document (a file with one JSON object a line is named .jsonl)"
            ) from error
        self._rows = [json.dumps(row).encode() for row in (document if isinstance(document, list) else [document])]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def where(self, row: int) -> str:
        """Return the file and the row, counted from 1."""
        return f"{self.path}, row {row + 1}"

    def read(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Yield the JSON text of the given rows."""
        return (self._rows[row] for row in rows)


def parse_row(raw: bytes) -> dict[str, JsonValue]:
    """Return the object that one row holds.

    Raises:
        SourceError: the row is not UTF-8, not JSON or not an object. The message does not name the place.

    """
    row = _parse(raw)
    if not isinstance(row, dict):
        raise SourceError(f"the row is {_kind(row)}, expected an object with messages")
    return row


def _parse(raw: bytes) -> JsonValue:
    try:
        return cast(JsonValue, json.loads(raw.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise SourceError(f"byte {error.start} is not valid UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise SourceError(f"not valid JSON ({error.msg} at {line}column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"JSON that cannot be read ({error})") from error


def _kind(value: JsonValue) -> str:
    return "null" if value is None else f"a JSON {type(value).__name__}"


def _file_version(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
