"""Files of rows: JSON Lines read by offset, and JSON documents."""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dspark_store.sources.rows import MAX_ROW_BYTES, RowData, parse_json
from dspark_store.sources.source import SourceError
from dspark_store.sources.spool import Spool


class JsonlRows:
    """JSON Lines. Memory is 8 bytes per row, whatever the rows hold.

    Only `\\n` ends a line (a row may contain U+2028 and the like), and lines of white space are skipped.
    """

    def __init__(self, path: Path, spool: Spool | None = None) -> None:
        """Read the file once, for its SHA-256 and the offset of each row.

        Args:
            path: the file.
            spool: a file that holds the text in its place, for a compressed `path`.

        """
        self.unread: dict[str, int] = {}  # what a row has beside what is read, it shows itself
        self._path = path
        self._spool = spool
        self._file: BinaryIO | None = None
        self._version: tuple[int, int] | None = None
        digest = hashlib.sha256()
        offsets, blank_before_row = array("q"), array("q")
        file = self._opened()
        file.seek(0)
        position = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            digest.update(line)
            if line.isspace() and len(line) <= MAX_ROW_BYTES:
                blank_before_row.append(len(offsets))
            else:
                offsets.append(position)
            position += len(line)
            while not line.endswith(b"\n") and (line := file.readline(MAX_ROW_BYTES + 1)):
                digest.update(line)
                position += len(line)
        self.content_sha256 = digest.hexdigest()
        self.beside_sha256: str | None = None
        self._offsets = np.array(offsets, dtype=np.int64)
        self._blank_before_row = np.array(blank_before_row, dtype=np.int64)
        self.close()

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._offsets)

    def where(self, row: int) -> str:
        """Return the file and the line, counted from 1 and with the blank ones."""
        blanks = int(np.searchsorted(self._blank_before_row, row, side="right"))
        return f"{self._path}, line {row + blanks + 1}"

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the given lines; SourceError if the file has changed since their offsets were taken."""
        file = self._opened()
        lines: list[RowData] = []
        for row in rows:
            file.seek(int(self._offsets[row]))
            lines.append(file.readline(MAX_ROW_BYTES + 1))
        return lines

    def close(self) -> None:
        """Close the file; a spool stays, since it is the only place of the text."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._spool is not None:
            return self._spool.file
        if self._file is None:
            self._file = self._path.open("rb")
            status = os.fstat(self._file.fileno())
            version = (status.st_size, status.st_mtime_ns)
            if self._version not in (None, version):
                self.close()
                raise SourceError(f"{self._path} was changed while it was in use; start again")
            self._version = version
        return self._file


class JsonRows:
    """One JSON document, kept in memory: a list of rows, or one row."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Parse the document; SourceError if it is not JSON."""
        self.unread: dict[str, int] = {}
        self._path = path
        self.content_sha256 = hashlib.sha256(content).hexdigest()
        self.beside_sha256: str | None = None
        try:
            document = parse_json(content, limit=None) if content.strip() else []
        except SourceError as error:
            raise SourceError(
                f"{path}: {error}; expected one JSON document (a file with one JSON object a line is named .jsonl)"
            ) from error
        rows = document if isinstance(document, list) else [document]
        try:
            self._rows = [json.dumps(row).encode() for row in rows]
        except RecursionError as error:
            raise SourceError(f"{path} is nested too deeply to be read") from error

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def where(self, row: int) -> str:
        """Return the file and the row, counted from 1."""
        return f"{self._path}, row {row + 1}"

    def take(self, rows: Sequence[int]) -> list[RowData]:
        """Return the JSON text of the given rows."""
        return [self._rows[row] for row in rows]

    def close(self) -> None:
        """Do nothing: no file is open."""
