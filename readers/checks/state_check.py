"""A shard's states: every object decoded once, and the rows that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_store.format.codecs import CRC_BYTES, Plain
from dspark_store.format.damage import DamagedStoreError, Part
from dspark_store.format.dtypes import all_finite
from dspark_store.format.objects import StoredObject
from dspark_store.format.schema import INDEX_STATUS, LAST, StateObject, StoreSchema
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.readers.checks.findings import (
    SCRATCH,
    Findings,
    LedgerRow,
    StoreView,
    describe_error,
    open_settled,
)
from dspark_store.readers.checks.token_check import KnownTokens

_STATUS_KEY = f"{INDEX_STATUS}/c.0"


@dataclass(slots=True)
class Finiteness:
    """The rows of a shard that some object holds a value of that is not finite, and those of which not all is known."""

    nonfinite: set[int]
    unknown: set[int]


def check_states(view: StoreView, ledger: LedgerRow, tokens: KnownTokens, findings: Findings) -> int:
    """Check the state objects of a committed shard; return the bytes that were read."""
    seen = Finiteness(set(), set())
    opened: dict[StateObject, StoredObject | None] = {}
    for position, item in enumerate(view.schema.state_objects):
        opened[item] = None
        if item.column in view.foreign:
            ledger.settle(item.name, position, None)
        else:
            opened[item] = open_settled(view, item, position, ledger, findings, tokens=tokens.digest)
    last = next((stored for item, stored in opened.items() if item.column == LAST), None)
    twins: list[str] = []
    nbytes = 0
    for item, stored in opened.items():
        if item.column in view.foreign:
            _check_foreign(view, item, tokens, seen, findings)
        elif stored is None:
            seen.unknown.update(range(len(findings.samples)))
        elif last is not None and stored is not last and _shares_bytes(view.storage, stored, last):
            twins.append(stored.key)
        else:
            keys = [stored.key, *(twins if stored is last else ())]
            nbytes += _check_object(view, stored, keys, tokens.lengths, seen, findings)
        if stored is not None and stored is not last:
            stored.reader.close()
    if last is not None:
        last.reader.close()
    _check_status(view, seen, findings)
    return nbytes


def _shares_bytes(storage: Storage, one: StoredObject, other: StoredObject) -> bool:
    """Tell whether two keys are names of one file: what is read under one need not be read under the other."""
    if one.tail.record != other.tail.record or not isinstance(storage, LocalStorage):
        return False
    try:
        return storage.path(one.key).samefile(storage.path(other.key))
    except OSError:  # one was replaced meanwhile
        return False


def _check_object(
    view: StoreView,
    stored: StoredObject,
    keys: Sequence[str],
    lengths: Sequence[int | None],
    seen: Finiteness,
    findings: Findings,
) -> int:
    """Check the chunks of an object, which stands at all of ``keys``; return the bytes that were read."""
    label, count = stored.tail.label, len(findings.samples)
    messages = _misplaced_chunks(view.schema, stored, lengths)
    nonfinite: set[int] = set()
    if view.quick:
        nonfinite.update(label.nonfinite)
    else:
        try:
            _check_chunks(view.schema.stored, stored, lengths, messages, nonfinite)
        except (OSError, DamagedStoreError) as error:
            messages |= {row: describe_error(error, stored.key) for row in range(count) if row not in messages}
    stray = {row for row in messages if row >= count}
    for key in keys:
        findings.add_rows(Part.STATES, key, {row: text for row, text in messages.items() if row < count})
        if stray:
            findings.add(Part.STATES, key, f"has chunks past its {count} rows", [])
        differing = (nonfinite ^ set(label.nonfinite)) - messages.keys()
        if differing:
            text = "rows that are not finite are other ones than its trailer names"
            findings.add(Part.STATES, key, text, [row for row in differing if row < count])
    seen.nonfinite |= nonfinite
    seen.unknown |= messages.keys()
    return 0 if view.quick else stored.reader.size


def _misplaced_chunks(schema: StoreSchema, stored: StoredObject, lengths: Sequence[int | None]) -> dict[int, str]:
    """Return a message for each row that has more or fewer chunks than its length asks for."""
    grid = schema.states
    counts = stored.tail.present.reshape(-1, grid.chunks_per_row).sum(axis=1).tolist()
    messages = {}
    for row, found in enumerate(counts):
        length = lengths[row] if row < len(lengths) else 0
        if length is not None and found != grid.chunks_of(max(0, length)):
            messages[row] = f"has {found} chunks in row {row}, expected {grid.chunks_of(max(0, length))}"
    return messages


def _check_chunks(
    schema: StoreSchema,
    stored: StoredObject,
    lengths: Sequence[int | None],
    messages: dict[int, str],
    nonfinite: set[int],
) -> None:
    """Decode every chunk; note rows that are damaged in ``messages``, and rows with a value that is not finite."""
    step, per_row = schema.chunk_tokens, schema.states.chunks_per_row
    chain, dtype = schema.chain(LAST), schema.dtype
    shape, plain = (step, schema.hidden_size), isinstance(chain.compressor, Plain)
    crcs = stored.tail.crcs.ravel().tolist()
    fill = dtype.bits.type(dtype.fill_bits)
    for slot, chunk in stored.chunks(SCRATCH):
        row, place = divmod(slot, per_row)
        length = lengths[row] if row < len(lengths) else 0
        positions = step if length is None else min(step, max(0, length - place * step))
        try:
            if plain:  # it is read where it lies
                chain.check(chunk, crcs[slot])
                bits = np.frombuffer(chunk[:-CRC_BYTES], dtype.bits).reshape(shape)
            else:
                decoded = SCRATCH.chunk(shape, dtype.stored)
                chain.decode(chunk, decoded, crc=crcs[slot])
                bits = decoded.view(dtype.bits)
            if length is not None and positions < step and (bits[positions:] != fill).any():
                raise DamagedStoreError("holds values past the sample's end")
        except ValueError as error:  # damage, and uncompressed chunks of another size
            messages.setdefault(row, f"slot {slot}: {error}")
            continue
        if not all_finite(bits[:positions], dtype) and length is not None:
            nonfinite.add(row)


def _check_foreign(
    view: StoreView, item: StateObject, tokens: KnownTokens, seen: Finiteness, findings: Findings
) -> None:
    """Read a column that was rewritten, through zarr-python: it has no trailers, only its own codecs' checks."""
    if view.quick:
        seen.unknown.update(range(len(findings.samples)))
        return
    from dspark_store.readers.foreign import ForeignColumn  # zarr-python takes a second to import

    schema = view.schema.stored

    source = ForeignColumn(view.storage, item.column, schema)
    messages: dict[int, str] = {}
    for row, sample in enumerate(findings.samples):
        length = tokens.lengths[row]
        if length is None:
            seen.unknown.add(row)
            continue
        out = np.empty((min(max(0, length), schema.seq_length), schema.hidden_size), schema.dtype.stored)
        try:
            source.fetch(sample, item.slot, 0, len(out), out)
        except (OSError, DamagedStoreError) as error:
            messages[row] = f"layer slot {item.slot}: {error}"
            continue
        if not all_finite(out.view(schema.dtype.bits), schema.dtype):
            seen.nonfinite.add(row)
    findings.add_rows(Part.STATES, item.column, messages)
    seen.unknown |= messages.keys()


def _check_status(view: StoreView, seen: Finiteness, findings: Findings) -> None:
    """Compare ``index/status`` with the rows that were found not to be finite."""
    status = view.rows_of(INDEX_STATUS, findings.samples)
    if status is None:
        return
    messages = {}
    for row, sample in enumerate(findings.samples):
        found = row in seen.nonfinite
        if (found or row not in seen.unknown) and int(status[row]) != int(found):
            messages[row] = f"is {status[row]} for sample {sample}, whose states are {'not ' * found}all finite"
    findings.add_rows(Part.INDEX, _STATUS_KEY, messages)
