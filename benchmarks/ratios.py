"""How far each codec compresses real states, by cache dtype: what ``--estimate`` reckons with.

``python -m benchmarks.ratios STORE`` takes a store of float32 states, casts them to each cache dtype, and encodes their
chunks with each preset as a store keeps them, the fill behind the last positions included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.flags import parsed
from benchmarks.tables import Column, Recorder, Table
from dspark_store import open_cache
from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.sizes import of_ragged_rows, ragged_rows_name
from dspark_store.inspection.estimate.measurement import Variant, state_row_bytes, variants
from dspark_store.readers.cache import Cache


def layer_bytes(cache: Cache, variant: Variant, samples: Sequence[int]) -> list[int]:
    """Return the stored bytes of some samples' states, of each captured layer."""
    schema = variant.schema(cache.schema)
    totals = [0] * len(cache.layer_ids)
    for sample in samples:
        length = int(cache.lengths[sample])
        states = cache.read([sample], positions=slice(0, length), columns=("target_hidden_states",), layout="stacked")
        for slot, layer in enumerate(states["target_hidden_states"][0]):
            totals[slot] += state_row_bytes(schema, layer)
    return totals


def main(arguments: Sequence[str]) -> int:
    """Run the measurement; return the exit code."""
    given = parsed("ratios", arguments)
    recorder = Recorder("ratios", [argument.replace(str(given.store), "STORE") for argument in arguments])
    cache = open_cache(given.store)
    samples = range(min(32, len(cache)))
    tokens, layers = int(cache.lengths[: len(samples)].sum()), len(cache.layer_ids)
    target = Path(str(cache.manifest.get("target_model", "a target"))).name
    layer_ids = list(cache.layer_ids)
    recorder.describe(f"real states of {target}, layers {layer_ids}, {len(samples)} samples, chunks as stored")
    rows = []
    for variant in variants(list(CACHE_DTYPES)):
        stored = layer_bytes(cache, variant, samples)
        share = of_ragged_rows(cache.schema, tokens, sum(stored))
        values = tokens * cache.schema.hidden_size
        rows.append((variant.dtype, variant.codec, share, min(stored) / values, max(stored) / values))
    shares = (Column(f"of {ragged_rows_name(layers + 1)}", ".3f"),)
    each = (Column(f"bytes per value, {name} layer", ".3f") for name in ("lowest", "highest"))
    columns = (Column("dtype"), Column("codec"), *shares, *each)
    recorder.add(Table("Stored bytes of states", columns, tuple(rows)))
    recorder.save(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
