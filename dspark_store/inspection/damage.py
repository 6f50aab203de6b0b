"""Damage that is met on the way, and told of beside what is sound."""

from __future__ import annotations

from collections.abc import Callable

from dspark_store.format.damage import DamagedStoreError


def told[Value](read: Callable[[], Value], damage: list[str]) -> Value | None:
    """Return what ``read`` returns; None, with a line added to ``damage``, for something that is not as written."""
    try:
        return read()
    except (DamagedStoreError, OSError) as error:
        damage.append(str(error))
        return None
