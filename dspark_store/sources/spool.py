"""A temporary file that lives as long as the object that reads it."""

import tempfile
import weakref
from typing import BinaryIO, cast


class Spool:
    """A nameless temporary file (in `TMPDIR`), closed and gone when nothing refers to this any more."""

    def __init__(self) -> None:
        self.file = cast(BinaryIO, tempfile.TemporaryFile(prefix="dspark-store-"))  # noqa: SIM115 - closed below
        weakref.finalize(self, self.file.close)
