"""What a finished job tells its user."""

from __future__ import annotations

from dspark_store.format.ledger import distinct_bytes
from dspark_store.format.volumes import padded_bytes, ragged_rows_bytes
from dspark_store.precompute.capture import CaptureReport
from dspark_store.precompute.progress import size_text, time_text
from dspark_store.readers.cache import Cache


def stored_bytes(cache: Cache) -> int:
    """Return the bytes of all objects of a complete store, shared ones once."""
    return int(distinct_bytes(cache.index.objects).sum())


def print_report(cache: Cache, report: CaptureReport) -> None:
    """Print what the store holds, what it cost, how it compares, and what to do next."""
    tokens = int(cache.lengths.sum())
    stored = stored_bytes(cache)
    unsupervised = int((cache.supervised == 0).sum())
    nonfinite = int((cache.status != 0).sum())
    ragged, padded = ragged_rows_bytes(cache.schema, tokens), padded_bytes(cache.schema, len(cache))
    print(
        f"captured {report.tokens:,} tokens of {report.shards} shards in {time_text(report.seconds)}, "
        f"{report.tokens_per_second:,.0f} tokens/s"
    )
    print(
        f"store    {len(cache):,} samples, {tokens:,} tokens (mean {tokens / max(1, len(cache)):.0f}), "
        f"{int(cache.supervised.sum()):,} supervised"
    )
    print(f"layers   {list(cache.layer_ids)} as {cache.schema.dtype.name}, codec {cache.schema.codec}")
    print(
        f"size     {size_text(stored)}: {ragged / stored:.2f}x smaller than ragged rows ({size_text(ragged)}), "
        f"{padded / stored:.2f}x smaller than padded safetensors ({size_text(padded)})"
    )
    if unsupervised:
        print(f"note     {unsupervised:,} samples have no supervised token; they are stored all the same")
    if nonfinite:
        print(
            f"note     {nonfinite:,} samples have states that are not finite in {cache.schema.dtype.name}; "
            "they are marked in index/status and not trained on"
        )
    print(f"next     read it: dspark_store.open_cache({str(getattr(cache.storage, 'root', ''))!r})")
