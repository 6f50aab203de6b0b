"""The demo: cache a real small model's states over real conversations, look at the store, and check it.

``python -m benchmarks.demo DIR`` needs what ``benchmarks.fetch_target`` left in DIR. A second run goes on with the
store that is there.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import zarr

from benchmarks.flags import parsed
from dspark_store import Cache, open_cache, verify_store
from dspark_store.format.sizes import of_rows_text, padded_bytes, ragged_rows_bytes
from dspark_store.precompute.recompute import recompute
from dspark_store.precompute.report import stored_bytes
from dspark_store.precompute.run import run
from dspark_store.precompute.settings import config_from
from dspark_store.target.capture import TargetCapture
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from dspark_store.text import size_text

SAMPLES, CHECKED, SEQ_LENGTH, BATCH_SIZE = 80, 8, 512, 4


def main(arguments: Sequence[str]) -> int:
    """Run the demo in the directory given; return the exit code, 1 when a check fails."""
    place: Path = parsed("demo", arguments).directory
    store = place / "store"
    model = str(next((place / "target").glob("*.gguf")))
    print(f"\n1. Run the target over {SAMPLES} conversations and write its states to {store}\n")
    places = {"target_model": model, "input_data": str(place / "messages.jsonl"), "output_dir": str(store)}
    sizes = {"seq_length": SEQ_LENGTH, "batch_size": BATCH_SIZE, "shard_size": 16, "max_samples": SAMPLES}
    run(config_from({**places, **sizes, "device": "cpu", "resume": store.exists()}))
    print(f"\n2. What any Zarr reader sees: zarr.open({str(store)!r}).tree()\n")
    print(zarr.open_group(store, mode="r").tree())
    cache = open_cache(store)
    _print_sizes(cache)
    return _check(cache, model, store)


def _print_sizes(cache: Cache) -> None:
    tokens = int(cache.lengths.sum())
    ways = {
        "stored": stored_bytes(cache),
        "ragged rows": ragged_rows_bytes(cache.schema, tokens),
        "padded safetensors": padded_bytes(cache.schema, len(cache)),
    }
    rate = cache.record.producers[-1].get("tokens_per_second", 0)
    print(f"\n3. How large it is: {len(cache)} samples of {tokens / len(cache):.0f} tokens in the mean\n")
    for name, count in ways.items():
        print(f"   {name:18} {size_text(count):>10}   {of_rows_text(cache.schema, tokens, count)}")
    print(f"   captured at {rate:.0f} tokens/s")


def _check(cache: Cache, model: str, store: Path) -> int:
    print(f"\n4. Check every object, then {CHECKED} random samples against a fresh forward of the target\n")
    problems = verify_store(cache)
    print(f"   checksums, places, ledger: {len(problems)} problems")
    target = load_target(TargetSource(model), dtype=torch.float32, device=torch.device("cpu"))
    samples = random.Random(time.time_ns()).sample(range(len(cache)), CHECKED)
    different, capture = 0, TargetCapture(target, cache.layer_ids)
    for sample, difference in recompute(cache, capture, torch.device("cpu"), BATCH_SIZE, samples):
        different += difference > 0
        verdict = "equal bit by bit" if difference == 0 else f"DIFFERS by up to {difference:.3g}"
        print(f"   sample {sample:3d}, {int(cache.lengths[sample]):3d} tokens: {verdict}")
    if problems or different:
        return 1
    print(
        f"""
Done. Train from it:   batch = dspark_store.open_cache({str(store)!r}).read([0, 1, 2, 3])
Your own data:         dspark-store precompute --target-model MODEL --input-data CHATS.jsonl --output-dir DIR
How much it will be:   ... --estimate
"""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
