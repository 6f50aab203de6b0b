"""How far each codec compresses real states, by cache dtype: what ``--estimate`` reckons with.

``python -m benchmarks.ratios STORE`` takes a store of float32 states, casts them to each cache dtype, and encodes whole
chunks with each preset. Printed is the lowest and the highest ratio over the captured layers, and that of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
    cache = open_cache(arguments[0])
    samples = range(min(32, len(cache)))
    print(f"{cache.manifest['target_model']}: layers {list(cache.layer_ids)}, {len(samples)} samples")
    print("| dtype | codec | all layers | lowest | highest |")
    print("|---|---|---|---|---|")
    for dtype in CACHE_DTYPES.values():
        for preset in CODEC_PRESETS:
            totals = layer_ratios(cache, dtype, preset, samples)
            ratios = [raw / stored for raw, stored in totals]
            whole = sum(raw for raw, _ in totals) / sum(stored for _, stored in totals)
            print(f"| {dtype.name} | {preset} | {whole:.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
