"""The errors of the format, stored bytes that are not what was written, and what to do about them."""

from __future__ import annotations


class DamagedStoreError(ValueError):
    """A stored object is missing, truncated, altered or not the one that belongs in its place.

    The message names the object's key and, where it is known, the sample that it hits.
    """


class IrregularObjectError(DamagedStoreError, OSError):
    """What stands in an object's place is no regular file, or has more bytes than the object can have.

    Nothing of it was read. Also an OSError: it is met where the file system is asked.
    """


def remedy(store: object) -> str:
    """Return what an error says that a user can do about damage to a store."""
    return f"run dspark-store repair {store}"
