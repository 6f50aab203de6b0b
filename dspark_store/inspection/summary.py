"""Everything that can be said of a store in a moment, however large or unfinished it is: no state is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import Phase, StoreRecord
from dspark_store.format.metadata import Nodes, read_metadata, read_record, record_nodes
from dspark_store.format.schema import COLUMNS
from dspark_store.format.sizes import Volume
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.sample_survey import (
    LedgerRows,
    SampleSummary,
    SampleSurvey,
    SourceShare,
    read_ledgers,
    read_or_note,
    source_shares,
    survey_index,
    survey_shards,
)
from dspark_store.inspection.sizes import (
    ColumnSize,
    FileGroup,
    OtherLayouts,
    ShardRows,
    column_sizes,
    compare,
    files_beside,
    layer_sizes,
    token_sizes,
    total_size,
)
from dspark_store.precompute.estimate import stored_range
from dspark_store.readers.checks.strays import Links, find_links
from dspark_store.readers.index import StoreIndex
from dspark_store.writers.lock import LockHolder, read_holder


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of the states: S, H, K, the captured layers by id (empty while they have none), and how they lie."""

    seq_length: int
    hidden_size: int
    num_layers: int
    layer_ids: tuple[int, ...]
    dtype: str
    codec: str
    chunk_tokens: int
    values: str


@dataclass(frozen=True, slots=True)
class ShardRun:
    """Shards ``first`` to ``last``, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """How far a store is. ``total`` shards are unknown until the tokens are final.

    ``tokens`` and ``states`` are how many shards of each are committed, ``missing`` those without states;
    ``counted_tokens`` and ``counted_states`` how many ledger rows the sizes were taken from.
    """

    size: int
    total: int | None
    tokens: int
    states: int
    missing: tuple[ShardRun, ...]
    counted_tokens: int
    counted_states: int


@dataclass(frozen=True, slots=True)
class StatesToCome:
    """What the states that are missing will take: ``tokens`` of them, from ``least_bytes`` to ``most_bytes``.

    The two are equal where the shards so far tell; ``free_bytes`` are left on the disk.
    """

    tokens: int
    least_bytes: int
    most_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A store, in a tree of values that JSON has.

    ``layers`` are the layers in slot order, and then the last hidden states; ``together`` is the sum of the columns.
    ``comparison`` is None while no states are there, ``to_come`` when none are missing or nothing is known of them.
    ``damage`` is what is not as it was written, as far as it was met; ``notes`` what is to be known of a sound store.
    """

    place: str
    store_id: str
    phase: Phase
    complete: bool
    copied: bool
    damage: tuple[str, ...]
    notes: tuple[str, ...]
    writer: LockHolder | None
    shards: ShardSummary
    samples: SampleSummary
    layout: Layout
    columns: tuple[ColumnSize, ...]
    together: ColumnSize
    layers: tuple[ColumnSize, ...]
    comparison: OtherLayouts | None
    to_come: StatesToCome | None
    beside: tuple[FileGroup, ...]
    links: Links
    sources: tuple[SourceShare, ...]
    equality_classes: tuple[str, ...]
    producers: tuple[Mapping[str, JsonValue], ...]
    manifest: Mapping[str, JsonValue]
    target_config: Mapping[str, JsonValue] | None
    head: Mapping[str, JsonValue]


def missing_runs(total: int, committed: Sequence[int]) -> tuple[ShardRun, ...]:
    """Return the runs of shards below ``total`` that are not among the ``committed`` ones, which ascend."""
    ends = [-1, *(shard for shard in committed if shard < total), total]
    return tuple(ShardRun(one + 1, other - 1) for one, other in pairwise(ends) if other - one > 1)


def summarise(storage: LocalStorage) -> Summary:
    """Describe a store from its metadata, its index or its ledger.

    Damage stands in the summary as long as the root's metadata can be read. FileNotFoundError when there is no store,
    ValueError for another format version, DamagedStoreError when its root is not one.
    """
    damage: list[str] = []
    notes: list[str] = []
    writer = read_holder(storage)
    record, nodes = _metadata(storage, damage, notes, written=writer is not None and not writer.stale)
    schema, index = record.schema, StoreIndex(storage, record)
    tokens, states = read_ledgers(storage, record, index, damage)
    in_token_phase = record.phase == "tokens"
    survey = survey_shards(storage, record, tokens, damage) if in_token_phase else survey_index(index, record, damage)
    layers = layer_sizes(schema, _shard_rows(states, survey))
    columns = (*token_sizes(schema, _shard_rows(tokens, survey)), *column_sizes(layers))
    status = read_or_note(lambda: index.status, damage) if record.complete else None
    return Summary(
        place=str(storage.root),
        store_id=record.store_id,
        phase=record.phase,
        complete=record.complete,
        copied=record.copied_from is not None,
        notes=(*notes, *_notes(record, nodes)),
        writer=writer,
        shards=_shards(record, tokens, states),
        samples=survey.summary(schema.seq_length, None if status is None else int((status != 0).sum())),
        layout=Layout(
            schema.seq_length,
            schema.hidden_size,
            schema.num_layers,
            schema.layer_ids,
            schema.dtype.name,
            schema.codec,
            schema.chunk_tokens,
            schema.values,
        ),
        columns=columns,
        together=total_size("together", columns),
        layers=tuple(layers),
        comparison=_comparison(record, survey, columns, states.committed),
        to_come=_to_come(storage, record, survey, columns, states.committed),
        beside=files_beside(storage),
        links=find_links(storage),
        sources=() if in_token_phase else _sources(index, record, survey, damage),
        equality_classes=_equality_classes(record),
        producers=record.producers,
        manifest=record.manifest,
        target_config=record.target_config,
        head=record.head,
        damage=tuple(damage),
    )


def _sources(
    index: StoreIndex, record: StoreRecord, survey: SampleSurvey, damage: list[str]
) -> tuple[SourceShare, ...]:
    names = record.schema.sources
    source = read_or_note(lambda: index.source, damage) if names else None
    if source is None or survey.lengths is None or survey.supervised is None:
        return ()
    return tuple(source_shares(names, source, survey.lengths, survey.supervised))


def _shards(record: StoreRecord, tokens: LedgerRows, states: LedgerRows) -> ShardSummary:
    total = record.schema.tokens.num_shards
    return ShardSummary(
        size=record.schema.shard_size,
        total=total if total or record.phase != "tokens" else None,
        tokens=len(tokens.committed),
        states=len(states.committed),
        missing=missing_runs(total, states.committed),
        counted_tokens=len(tokens.shards),
        counted_states=len(states.shards),
    )


def _metadata(
    storage: LocalStorage, damage: list[str], notes: list[str], *, written: bool
) -> tuple[StoreRecord, Nodes | None]:
    """Read the attributes and the nodes, None for nodes that are not as sealed.

    In a growing store that is ``written`` at the moment that is no damage: its writer replaces them one by one.
    """
    record = read_record(storage)
    broken: list[str] = []
    metadata = read_or_note(lambda: read_metadata(storage), broken)
    if metadata is not None:
        return metadata.record, metadata.nodes
    if written and not record.complete:
        notes.append(f"its writer seems to be changing its metadata, look again in a moment: {broken[0]}")
    else:
        damage += broken
    return record, None


def _shard_rows(ledger: LedgerRows, survey: SampleSurvey) -> ShardRows:
    read = [number for number, shard in enumerate(ledger.shards) if shard < len(survey.shard_samples)]
    shards = [ledger.shards[number] for number in read]
    tokens = None if survey.shard_tokens is None else survey.shard_tokens[shards]
    by_shard = survey.shard_samples if survey.shard_tokens is None else survey.shard_tokens
    counted, whole = int(by_shard[shards].sum()), _sum_of(by_shard, ledger.committed)
    factor = whole / counted if counted else 1.0
    return ShardRows(ledger.rows[read], survey.shard_samples[shards], tokens, factor)


def _sum_of(by_shard: np.ndarray, shards: Sequence[int]) -> int:
    return int(by_shard[[shard for shard in shards if shard < len(by_shard)]].sum())


def _comparison(
    record: StoreRecord, survey: SampleSurvey, columns: Sequence[ColumnSize], captured: Sequence[int]
) -> OtherLayouts | None:
    """Compare the samples whose states are there; of ids and mask they take their tokens' share."""
    if survey.shard_tokens is None or not captured:
        return None
    samples, tokens = _sum_of(survey.shard_samples, captured), _sum_of(survey.shard_tokens, captured)
    share = tokens / max(1, int(survey.shard_tokens.sum()))
    *token_columns, layers, last = (column.stored_bytes for column in columns)
    return compare(record.schema, samples, tokens, layers + last + round(sum(token_columns) * share))


def _to_come(
    storage: LocalStorage,
    record: StoreRecord,
    survey: SampleSurvey,
    columns: Sequence[ColumnSize],
    captured: Sequence[int],
) -> StatesToCome | None:
    if record.complete or survey.shard_tokens is None:
        return None
    done = _sum_of(survey.shard_tokens, captured)
    tokens = int(survey.shard_tokens.sum()) - done
    if done:
        least = most = sum(column.stored_bytes for column in columns[-2:]) / done * tokens
    elif record.manifest.get("num_hidden_layers") is not None and survey.lengths is not None and len(survey.lengths):
        chunk = record.schema.chunk_tokens
        factor = survey.samples / len(survey.lengths)
        whole = round(int((-(-survey.lengths // chunk) * chunk).sum()) * factor)
        volume = Volume(survey.samples, tokens, whole, supervised=0, unsupervised_samples=0)
        least, most = stored_range(record.schema, record.last_layer, volume)
    else:
        return None
    return StatesToCome(tokens, round(least), round(most), storage.free_bytes())


def _equality_classes(record: StoreRecord) -> tuple[str, ...]:
    named = {str(producer["equality_class"]) for producer in record.producers if "equality_class" in producer}
    return tuple(sorted(named))


def _notes(record: StoreRecord, nodes: Nodes | None) -> list[str]:
    notes = []
    expected = record_nodes(record)
    foreign = [column for column in COLUMNS if nodes is not None and nodes[column] != expected[column]]
    if foreign:
        notes.append(
            f"{', '.join(foreign)}: encoded anew by another tool; the sizes are those of what was first written"
        )
    if len(_equality_classes(record)) > 1:
        notes.append(f"captured in several equality classes: {', '.join(_equality_classes(record))}")
    if record.copied_from is not None:
        copied = record.copied_from
        notes.append(
            f"a copy of store {copied.store_id} by dspark-store rechunk; batches were formed in shards of "
            f"{copied.capture_shard_size}"
        )
    whole = record.manifest.get("target_num_hidden_layers_full")
    if whole is not None:
        depth = record.manifest.get("num_hidden_layers")
        notes.append(f"of a target cut to its first {depth} of {whole} layers: no draft of it can be trained")
    if not record.manifest:
        notes.append("no manifest: it was written by calls, and not by a precompute, or its manifest is yet to come")
    return notes
