"""How near ``dspark-store estimate`` comes to the bytes of a store that is there.

``python -m benchmarks.estimate STORE`` takes a store whose target and data still lie where its manifest says (that of
``benchmarks.demo`` does), estimates it anew from some of its rows, run through the target, and compares the result with
all files of the directory, each once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.flags import parsed
from benchmarks.storage import distinct_files
from dspark_store import open_cache
from dspark_store.inspection.estimate.forecast import forecast_job
from dspark_store.precompute.settings import config_from
from dspark_store.readers.cache import Cache

MEASURED = (0, 8, 16, 32, 64)
_OF_MANIFEST = ("target_model", "seq_length", "shard_size", "batch_size", "dtype", "codec", "chunk_tokens")


def settings_of_store(cache: Cache) -> dict[str, object]:
    """Return the settings that a store was made with, as far as they decide its samples and its size."""
    manifest = cache.manifest
    return {
        **{name: manifest[name] for name in _OF_MANIFEST},
        "input_data": manifest["train_data_path"],
        "output_dir": ".",
        "target_layer_ids": list(cache.layer_ids),
        "shuffle_seed": manifest["shuffle_seed"],
        "max_samples": len(cache),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the measurement; return the exit code."""
    place: Path = parsed("estimate", arguments).store
    cache = open_cache(place)
    stored = sum(distinct_files(place).values())
    print(f"{len(cache):,} samples, {int(cache.lengths.sum()):,} tokens, {stored:,} bytes in the directory\n")
    print("| rows measured | estimate | off by | range | holds |")
    print("|---|---|---|---|---|")
    for rows in (*(rows for rows in MEASURED if rows < len(cache)), len(cache)):
        total = forecast_job(config_from(settings_of_store(cache)), rows).chosen.total
        spread = (total.most - total.least) / 2 / total.expected
        holds = "yes" if total.least <= stored <= total.most else "no"
        off = total.expected / stored - 1
        print(f"| {rows} | {total.expected:,.0f} | {off:+.2%} | {spread:.2%} | {holds} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
