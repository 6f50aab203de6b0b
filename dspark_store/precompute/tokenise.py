"""Phase 1: the source is read and tokenised once, streaming, into committed token shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from dspark_store.format.ledger import state_ledger, token_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.objects import Expected, open_object
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import TokenRows
from dspark_store.precompute.rows import no_samples
from dspark_store.progress import start_progress
from dspark_store.sources.source import Resuming, Sample, Source, SourceError
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.tokens import write_token_shard


def tokenise(
    storage: Storage,
    record: StoreRecord,
    source: Source,
    check: Callable[[], None] = lambda: None,
    on_sample: Callable[[], None] = lambda: None,
) -> StoreRecord:
    """Write the token shards that the store lacks, then settle N and enter the states phase.

    ``check`` is called after every shard, ``on_sample`` after every sample that the source gives; both may raise to
    stop.

    Every ledger row holds the cursor into the source after its shard, so a killed phase goes on where it was, and a
    hole is filled by reading just its records.
    """
    ledger = token_ledger(storage)
    committed = set(ledger.committed())
    last = max(committed, default=-1)
    with start_progress("tokenise", len(source), "rows") as progress:
        shard, cursor, given, tokens, passed, ended = 0, 0, 0, 0, 0, False
        samples: Iterator[Sample] | None = None
        while not ended:
            if shard in committed:
                count, cursor, samples = int(ledger.row(shard)[2, 1]), int(ledger.row(shard)[2, 0]), None
            else:
                samples = _calling(on_sample, _read_on(source, cursor, given)) if samples is None else samples
                taken = list(islice(samples, record.schema.shard_size))
                count = len(taken)
                if taken:
                    cursor, rows = taken[-1].cursor, _rows(taken)
                    _refuse_other_tokens(storage, record, shard, rows)
                    write_token_shard(storage, record, shard, rows, cursor)
                    tokens += sum(len(sample.input_ids) for sample in taken)
            ended = count < record.schema.shard_size
            if ended and shard < last:
                raise SourceError(
                    f"the source ended at record {source.record_of(cursor)} of {len(source)}: it changed while it was "
                    "read"
                )
            progress.advance(source.record_of(cursor) - passed, f"{tokens:,} new tokens")
            passed = source.record_of(cursor)
            shard, given = shard + (count > 0), given + count
            check()
    if shard == 0:
        raise no_samples(source)
    return settle_tokens(storage, record)


def _calling(on_sample: Callable[[], None], samples: Iterator[Sample]) -> Iterator[Sample]:
    for sample in samples:
        on_sample()
        yield sample


def _read_on(source: Source, cursor: int, given: int) -> Iterator[Sample]:
    """Return the samples from a cursor on, before which the source has given so many."""
    if isinstance(source, Resuming):
        source.resume(cursor, given)
    return source.read(cursor)


def _refuse_other_tokens(storage: Storage, record: StoreRecord, shard: int, rows: TokenRows) -> None:
    """Refuse tokens for a shard whose states were captured from others: both are then of no use to each other.

    A repaired store may have states before it has their tokens again.
    """
    if not storage.exists(state_ledger(storage, record.schema).key(shard)):
        return
    last = record.schema.state_objects[-1]
    expected = Expected(record.store_id, last.place(shard))
    stored = open_object(storage, last.key(shard), record.schema.states, expected)
    stored.reader.close()
    if stored.tail.label.tokens != rows.digest:
        raise ValueError(
            f"the tokens that shard {shard} is given now are not those of its states: another version of a package "
            "tokenises otherwise; go on with the versions that made the store"
        )


def _rows(samples: Sequence[Sample]) -> TokenRows:
    return TokenRows(
        [sample.input_ids for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.origin for sample in samples],
    )
