"""Phase 1: the source is read and tokenised once, streaming, into committed token shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from dspark_store.format.manifest import StoreRecord
from dspark_store.format.storage import Storage
from dspark_store.precompute.progress import Progress
from dspark_store.sources.source import Sample, Source, SourceError
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.tokens import TokenRows, token_ledger, write_token_shard


def tokenise(
    storage: Storage, record: StoreRecord, source: Source, check: Callable[[], None] = lambda: None
) -> StoreRecord:
    """Write the token shards that the store lacks, then settle N and enter the states phase.

    ``check`` is called after every shard, and may raise to stop.

    Every ledger row holds the cursor into the source after its shard, so a killed phase goes on where it was, and a
    hole is filled by reading just its records.
    """
    ledger = token_ledger(storage)
    committed = set(ledger.committed())
    with Progress("tokenise", len(source), "rows") as progress:
        shard, cursor, tokens = 0, 0, 0
        samples: Iterator[Sample] | None = None
        while cursor < len(source):
            if shard in committed:
                count, cursor, samples = int(ledger.row(shard)[2, 1]), int(ledger.row(shard)[2, 0]), None
            else:
                samples = source.read(cursor) if samples is None else samples
                rows = _take(samples, record.schema.shard_size)
                if not len(rows):
                    raise SourceError(
                        f"the source ended at record {cursor} of {len(source)}: it changed while it was read"
                    )
                cursor, count = cursor + len(rows), len(rows)
                write_token_shard(storage, record, shard, rows, cursor)
                tokens += sum(rows.lengths)
            progress.advance(count, f"{tokens:,} new tokens")
            shard += 1
            check()
    if shard == 0:
        raise SourceError("the source has no samples")
    return settle_tokens(storage, record)


def _take(samples: Iterator[Sample], count: int) -> TokenRows:
    taken = list(islice(samples, count))
    return TokenRows([sample.input_ids for sample in taken], [sample.loss_mask for sample in taken])
