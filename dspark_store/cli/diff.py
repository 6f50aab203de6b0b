"""``dspark-store diff``: what two stores have in common, and what not."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dspark_store.cli.options import DIFFERENT
from dspark_store.format.jsonvalue import JsonValue, canonical_json
from dspark_store.text import say, say_json

if TYPE_CHECKING:
    from dspark_store.inspection.compare import FieldDifference, StoreComparison
    from dspark_store.readers.cache import Cache

_SHOWN_SAMPLES = 10
_SHOWN_TEXT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("a", metavar="A", help="a store, finished or growing")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="compare the states of N samples, taken at random, and not of all"
    )
    parser.add_argument("--layers", type=int, nargs="+", metavar="ID", help="layers to compare; all that both have")
    parser.add_argument("--threads", type=int, help="threads that compare shards; one per core by default")
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")


def run(given: argparse.Namespace) -> int:
    """Print where the stores differ; return 0 when they do not, else 1."""
    for name in ("samples", "threads"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    from dspark_store.inspection.compare import compare_stores
    from dspark_store.readers.cache import open_cache

    a, b = (open_cache(path, allow_incomplete=True, allow_reduced_depth=True) for path in (given.a, given.b))
    found = compare_stores(a, b, samples=given.samples, layers=given.layers, threads=given.threads)
    if given.json:
        say_json(_document(found, a, b))
    else:
        for line in _lines(found, a, b):
            say(line)
    return 0 if found.is_equal else DIFFERENT


def _lines(found: StoreComparison, a: Cache, b: Cache) -> Iterator[str]:
    for name, cache in (("A", a), ("B", b)):
        phase = "complete" if cache.record.complete else f"{len(cache.index.committed())} shards committed"
        layers = " ".join(map(str, cache.layer_ids))
        yield f"{name}         {len(cache):,} samples, layers {layers}, {cache.schema.values}, {phase}"
    yield from _field_lines("identity", found.metadata.identity)
    yield from _field_lines("layout", found.metadata.layout)
    yield from _field_lines("recorded", found.metadata.recorded)
    yield from _sample_lines(found)
    yield from _state_lines(found)
    yield from (_weight_lines(found) if a.record.weights or b.record.weights else ["weights   in neither store"])
    yield f"verdict   {'equal' if found.is_equal else 'different'}"


def _field_lines(what: str, fields: Sequence[FieldDifference]) -> Iterator[str]:
    if not fields:
        yield f"{what:9} the same"
    for field in fields:
        yield f"{what:9} {field.field}: A {_text(field.a)}, B {_text(field.b)}"


def _text(value: JsonValue) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}..."


def _sample_lines(found: StoreComparison) -> Iterator[str]:
    samples = found.samples
    moved = f", {samples.moved:,} of them at another place" if samples.moved else ""
    yield f"samples   {len(samples):,} in both{moved}"
    for name, only in (("A", samples.only_a), ("B", samples.only_b)):
        if len(only):
            shown = ", ".join(map(str, only[:_SHOWN_SAMPLES])) + (", ..." if len(only) > _SHOWN_SAMPLES else "")
            yield f"samples   {len(only):,} only in {name}: {shown}"


def _state_lines(found: StoreComparison) -> Iterator[str]:
    states, how = found.states, "bit by bit" if found.exact else "as float32, since the dtypes differ"
    missing = len(found.samples) - found.comparable
    rest = f"; {missing:,} are not captured in both" if missing else ""
    yield f"states    {states.compared:,} samples compared, {states.equal:,} equal {how}{rest}"
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            yield f"states    layers only in {name}: {' '.join(map(str, only))}"
    for layer, (largest, unequal) in states.by_layer.items():
        what = "last hidden states" if layer is None else f"layer {layer}"
        verdict = f"largest difference {largest:.6g}, {unequal:,} samples differ" if unequal else "equal"
        yield f"states    {what}: {verdict}"
    if states.worst is not None:
        yield f"worst     sample {states.worst.a} of A, {states.worst.b} of B: {states.worst.difference:.6g}"


def _weight_lines(found: StoreComparison) -> Iterator[str]:
    if not found.weights:
        yield "weights   the same"
    for table in found.weights:
        yield f"weights   {table.path}: {table.reason or f'largest difference {table.largest:.6g}'}"


def _document(found: StoreComparison, a: Cache, b: Cache) -> dict[str, JsonValue]:
    states, worst = found.states, found.states.worst
    return {
        "equal": found.is_equal,
        "a": str(a.storage),
        "b": str(b.storage),
        **asdict(found.metadata),
        "samples": {
            "both": len(found.samples),
            "moved": found.samples.moved,
            "only_a": found.samples.only_a.tolist(),
            "only_b": found.samples.only_b.tolist(),
        },
        "states": {
            "exact": found.exact,
            "comparable": found.comparable,
            "compared": states.compared,
            "equal": states.equal,
            "layers_only_a": list(found.only_a),
            "layers_only_b": list(found.only_b),
            "layers": [
                {"layer_id": layer, "largest": _number(largest), "unequal": unequal}
                for layer, (largest, unequal) in states.by_layer.items()
            ],
            "worst": None if worst is None else {"a": worst.a, "b": worst.b, "largest": _number(worst.difference)},
        },
        "weights": [{**asdict(table), "largest": _number(table.largest)} for table in found.weights],
    }


def _number(value: float | None) -> JsonValue:
    """Return a number as JSON has it: infinity is the text "inf"."""
    return "inf" if value is not None and math.isinf(value) else value
