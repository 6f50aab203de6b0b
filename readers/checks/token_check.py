"""A shard's tokens: ids and masks, their sources, and what the index says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.damage import DamagedStoreError, Part
from dspark_store.format.grid import ShardGrid
from dspark_store.format.objects import Expected, StoredObject
from dspark_store.format.schema import (
    IDS,
    INDEX_DIGEST,
    INDEX_LENGTH,
    INDEX_SOURCE,
    INDEX_SUPERVISED,
    MASK,
    SHARD_SOURCES,
    SOURCE_FILL,
    StateObject,
    object_key,
)
from dspark_store.format.token_shards import TOKEN_VALUES, sample_digest, shard_digest, sources_key, sources_place
from dspark_store.readers.checks.findings import (
    SCRATCH,
    Findings,
    LedgerRow,
    StoreView,
    describe_error,
    open_checked,
    open_settled,
)

_INDEX_KEYS = {
    INDEX_LENGTH: f"{INDEX_LENGTH}/c.0",
    INDEX_SUPERVISED: f"{INDEX_SUPERVISED}/c.0",
    INDEX_DIGEST: f"{INDEX_DIGEST}/c.0.0",
    INDEX_SOURCE: f"{INDEX_SOURCE}/c.0",
}


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What is known of a shard's rows: the length of each, None where nothing tells it, and the tokens' digest.

    Both come from the tokens themselves, and from the index where those are damaged.
    """

    lengths: Sequence[int | None]
    digest: str | None
    nbytes: int


def check_tokens(view: StoreView, ledger: LedgerRow, findings: Findings) -> KnownTokens:
    """Check the objects of ids and masks against each other, their ledger row and the index."""
    nbytes = 0
    columns: dict[str, dict[int, np.ndarray]] = {}
    opened: dict[str, StoredObject] = {}
    for position, column in enumerate((IDS, MASK)):
        columns[column] = {}
        if column in view.foreign:
            columns[column] = _read_foreign(view, column, findings)
            ledger.settle(column, position, None)
            continue
        stored = open_settled(view, StateObject(column, 0, None), position, ledger, findings)
        if stored is None:
            continue
        opened[column] = stored
        if not view.quick:
            nbytes += stored.reader.size
            columns[column] = _read_column(view, column, stored, findings)
    rows = {} if view.quick else _join(columns, findings)
    known = _known(view, rows, findings, nbytes)
    for stored in opened.values():
        stored.reader.close()
        if known.digest is not None and stored.tail.label.tokens != known.digest:
            findings.add(Part.TOKENS, stored.key, "was written with other tokens than the shard holds")
    _check_index(view, rows, findings)
    return known


def _read_column(view: StoreView, column: str, stored: StoredObject, findings: Findings) -> dict[int, np.ndarray]:
    """Decode every row of a token object; return those that are whole, without what fills them up."""
    dtype, fill = TOKEN_VALUES[column]
    chain, count = view.schema.chain(column), len(findings.samples)
    values: dict[int, np.ndarray] = {}
    messages = {row: f"lacks the chunk in slot {row}" for row in range(count) if not stored.tail.present[row]}
    if stored.tail.present[count:].any():
        findings.add(Part.TOKENS, stored.key, f"has chunks past its {count} rows", [])
    try:
        for row, chunk in stored.chunks(SCRATCH):
            out = np.empty(view.schema.seq_length, dtype)
            try:
                chain.decode(chunk, out, crc=int(stored.tail.crcs.flat[row]))
            except DamagedStoreError as error:
                if row < count:
                    messages[row] = f"slot {row}: {error}"
                continue
            length = int((out != fill).sum())
            if row < count and (out[length:] != fill).any():
                messages[row] = f"slot {row}: the fill value stands between values"
            elif row < count:
                values[row] = out[:length].copy()  # a view would keep all of the row, however short
    except (OSError, DamagedStoreError) as error:
        findings.add(Part.TOKENS, stored.key, describe_error(error, stored.key))
        return {}
    findings.add_rows(Part.TOKENS, stored.key, messages)
    return values


def _read_foreign(view: StoreView, column: str, findings: Findings) -> dict[int, np.ndarray]:
    """Read a column that was rewritten: as many positions of each sample as the index says."""
    lengths = view.rows_of(INDEX_LENGTH, findings.samples)
    if view.quick or lengths is None:
        return {}
    from dspark_store.readers.foreign import ForeignColumn  # zarr-python takes a second to import

    source = ForeignColumn(view.storage, column, view.schema.stored)
    values: dict[int, np.ndarray] = {}
    messages: dict[int, str] = {}
    for row, sample in enumerate(findings.samples):
        out = np.empty(min(max(0, int(lengths[row])), view.schema.seq_length), TOKEN_VALUES[column][0])
        try:
            source.fetch(sample, 0, 0, len(out), out)
            values[row] = out
        except (OSError, DamagedStoreError) as error:
            messages[row] = str(error)
    findings.add_rows(Part.TOKENS, column, messages)
    return values


def _join(columns: dict[str, dict[int, np.ndarray]], findings: Findings) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the rows of which ids and mask are whole and belong together."""
    rows = {row: (columns[IDS][row], columns[MASK][row]) for row in columns[IDS].keys() & columns[MASK].keys()}
    messages = {}
    for row, (ids, mask) in sorted(rows.items()):
        if len(ids) != len(mask):
            messages[row] = f"slot {row}: {len(mask)} positions, where {IDS} has {len(ids)}"
        elif (mask > 1).any():
            messages[row] = f"slot {row}: a mask holds 0 and 1, not {int(mask.max())}"
    findings.add_rows(Part.TOKENS, object_key(MASK, findings.shard), messages)
    return {row: values for row, values in rows.items() if row not in messages}


def _known(
    view: StoreView, rows: dict[int, tuple[np.ndarray, np.ndarray]], findings: Findings, nbytes: int
) -> KnownTokens:
    recorded, digests = view.rows_of(INDEX_LENGTH, findings.samples), view.digests_of(findings.samples)
    lengths: list[int | None] = [None] * len(findings.samples) if recorded is None else recorded.tolist()
    known: list[bytes | None] = [None] * len(findings.samples) if digests is None else [*digests]
    for row, (ids, mask) in rows.items():
        lengths[row], known[row] = len(ids), sample_digest(ids, mask)
    whole = [digest for digest in known if digest is not None]
    return KnownTokens(lengths, shard_digest(whole) if len(whole) == len(known) else None, nbytes)


def _check_index(view: StoreView, rows: dict[int, tuple[np.ndarray, np.ndarray]], findings: Findings) -> None:
    """Compare the rows that are whole with what the index says of them."""
    facts: dict[str, Callable[[np.ndarray, np.ndarray], object]] = {
        INDEX_LENGTH: lambda ids, _mask: len(ids),
        INDEX_SUPERVISED: lambda _ids, mask: int(mask.sum()),
        INDEX_DIGEST: lambda ids, mask: np.frombuffer(sample_digest(ids, mask), "<u8").tolist(),
    }
    for path, fact in facts.items():
        recorded = view.rows_of(path, findings.samples)
        if recorded is None:
            continue
        messages = {
            row: f"differs from the tokens of sample {findings.samples[row]}"
            for row, values in sorted(rows.items())
            if recorded[row].tolist() != fact(*values)
        }
        findings.add_rows(Part.INDEX, _INDEX_KEYS[path], messages)


def check_sources(view: StoreView, tokens: KnownTokens, findings: Findings) -> None:
    """Check which source each row of a shard came from, in a store of several."""
    shard, schema, count = findings.shard, view.schema, len(findings.samples)
    key = sources_key(shard)
    expected = Expected(view.record.store_id, sources_place(shard), tokens=tokens.digest)
    numbers = np.empty(schema.shard_size, "<u2")
    try:
        stored = open_checked(view.storage, key, ShardGrid(1, 1, 1, 1), expected, count)
        try:
            for slot, chunk in () if view.quick else stored.chunks(SCRATCH):
                schema.chain(SHARD_SOURCES).decode(chunk, numbers, crc=int(stored.tail.crcs.flat[slot]))
        finally:
            stored.reader.close()
        if not stored.tail.present.all():
            raise DamagedStoreError("lacks its chunk")
    except (OSError, DamagedStoreError) as error:
        findings.add(Part.SHARD_SOURCES, key, describe_error(error, key))
        return
    if view.quick:
        return
    if (numbers[:count] >= len(schema.sources)).any() or (numbers[count:] != SOURCE_FILL).any():
        findings.add(Part.SHARD_SOURCES, key, f"does not name the sources of {count} rows")
        return
    recorded = view.rows_of(INDEX_SOURCE, findings.samples)
    if recorded is not None:
        rows = np.flatnonzero(recorded != numbers[:count]).tolist()
        messages = {row: f"differs from {key} for sample {findings.samples[row]}" for row in rows}
        findings.add_rows(Part.INDEX, _INDEX_KEYS[INDEX_SOURCE], messages)
