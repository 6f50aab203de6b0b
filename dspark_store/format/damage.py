"""The one error class of the format, stored bytes that are not what was written, and what to do about it."""

from __future__ import annotations


class DamagedStoreError(ValueError):
    """A stored object is missing, truncated, altered or not the one that belongs in its place.

    The message names the object's key and, where it is known, the sample that it hits.
    """


def remedy(store: object) -> str:
    """Return what an error says that a user can do about damage to a store."""
    return f"run dspark-store repair {store}"
