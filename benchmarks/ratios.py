"""How far each codec compresses real states, by cache dtype: what ``--estimate`` reckons with.

``python -m benchmarks.ratios STORE`` takes a store of float32 states, casts them to each cache dtype, and encodes whole
chunks with each preset. Printed is the lowest and the highest ratio over the captured layers, and that of all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import Column, Recorder, Table
from dspark_store import open_cache
from dspark_store.format.codecs import CODEC_PRESETS, state_chain
from dspark_store.format.dtypes import CACHE_DTYPES, CacheDtype, tensor_bits
from dspark_store.format.grid import default_chunk_tokens
from dspark_store.readers.cache import Cache


def layer_ratios(cache: Cache, dtype: CacheDtype, preset: str, samples: Sequence[int]) -> list[tuple[int, int]]:
    """Return (bytes before, bytes after) of every layer's whole chunks over some samples."""
    chain = state_chain(preset, dtype.itemsize)
    tokens = default_chunk_tokens(cache.schema.hidden_size, dtype.itemsize, cache.schema.seq_length, compressed=True)
    totals = []
    for layer in cache.layer_ids:
        raw = stored = 0
        for sample in samples:
            length = int(cache.lengths[sample])
            item = cache.read([sample], layers=[layer], positions=slice(0, length), columns=("target_hidden_states",))
            states = item["target_hidden_states"][0].to(dtype.torch_dtype).contiguous()
            for first in range(0, length, tokens):
                bits = tensor_bits(states[first : first + tokens])
                raw += bits.nbytes
                stored += chain.encode(bits.view(dtype.stored)).nbytes
        totals.append((raw, stored))
    return totals


def main(arguments: Sequence[str]) -> int:
    """Run the measurement; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ratios", description=__doc__)
    parser.add_argument("store", type=Path, metavar="STORE", help="a finished store of float32 states")
    parser.add_argument("--json", type=Path, help="file to write the outcome to")
    given = parser.parse_args(arguments)
    recorder = Recorder("ratios", [argument.replace(str(given.store), "STORE") for argument in arguments])
    cache = open_cache(given.store)
    samples = range(min(32, len(cache)))
    target = Path(str(cache.manifest.get("target_model", "a target"))).name
    recorder.describe(f"real states of {target}, layers {list(cache.layer_ids)}, {len(samples)} samples, whole chunks")
    rows = []
    for dtype in CACHE_DTYPES.values():
        for preset in CODEC_PRESETS:
            totals = layer_ratios(cache, dtype, preset, samples)
            ratios = [raw / stored for raw, stored in totals]
            whole = sum(raw for raw, _ in totals) / sum(stored for _, stored in totals)
            rows.append((dtype.name, preset, whole, min(ratios), max(ratios)))
    columns = (Column("dtype"), Column("codec"), *(Column(name, ".3f") for name in ("all layers", "lowest", "highest")))
    recorder.add(Table("Bytes of states a stored byte", columns, tuple(rows)))
    recorder.save(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
