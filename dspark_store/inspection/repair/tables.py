"""Putting the target's tables right: a tied head and the embedding are the same bytes at two places."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dspark_store.format.arrays import DIGEST_BYTES, array_keys, object_limit
from dspark_store.format.schema import EMBED, HEAD, HEAD_BIAS
from dspark_store.inspection.repair.mending import Mending
from dspark_store.readers.checks.arrays import check_weights


def mend_weights(mending: Mending) -> None:
    """Link the objects of a tied head and its embedding to the good ones of both; note other damage."""
    problems = check_weights(mending.storage, mending.record)
    if not problems:
        return
    bad = {problem.key for problem in problems}
    if any(key.startswith(f"{HEAD_BIAS}/") for key in bad) or not _mend_tied(mending, bad):
        mending.weights = str(problems[0])


def _mend_tied(mending: Mending, bad: set[str]) -> bool:
    """Choose for each object the place where it is whole, so that together they have the checksum of the tables."""
    record = mending.record
    checksum = record.checksums.get(EMBED)
    if checksum is None or checksum != record.checksums.get(HEAD):
        return False
    spec = record.schema.weights(record.weights[EMBED])
    limit = object_limit(spec)
    embedding, head = array_keys(EMBED, spec), array_keys(HEAD, spec)
    for first, second in ((embedding, head), (head, embedding)):
        chosen = [twin if key in bad else key for key, twin in zip(first, second, strict=True)]
        if _checksum(mending, chosen, limit) == checksum:
            for key, twin, good in zip(first, second, chosen, strict=True):
                _link(mending, good, twin if good == key else key, limit)
            return True
    return False


def _checksum(mending: Mending, keys: Sequence[str], limit: int) -> str | None:
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for key in keys:
        try:
            state.update(mending.storage.read(key, limit))
        except OSError:
            return None
    return state.hexdigest()


def _link(mending: Mending, good: str, key: str, limit: int) -> None:
    if _checksum(mending, [key], limit) != _checksum(mending, [good], limit):
        mending.storage.link(good, key)
        mending.restored.append(key)
