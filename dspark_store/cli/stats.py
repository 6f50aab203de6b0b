"""``dspark-store stats``: what the values of a store are like, as JSON and as a page with plots."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_store.cli.options import add_worker_arguments, workers_of
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.text import say

if TYPE_CHECKING:
    from dspark_store.inspection.stats.figures import Decode
    from dspark_store.inspection.stats.survey import Rules
    from dspark_store.readers.cache import Cache

JSON_NAME, PAGE_NAME = "stats.json", "stats.html"
_LAST = "last"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="the store's directory, which may still be growing")
    parser.add_argument(
        "--output", help="where to write both files; the directory STORE-stats beside the store otherwise"
    )
    parser.add_argument("--layers", nargs="+", help="captured layers to read, by id, and 'last'; all otherwise")
    parser.add_argument("--samples", type=int, help="read only so many samples, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of that draw")
    parser.add_argument(
        "--outlier-factor", type=float, default=10.0, help="times of the median channel, see the docs (default: 10)"
    )
    parser.add_argument("--tokenizer", help="the target, to show token ids as text; a local target is found by itself")
    add_worker_arguments(parser, "that read")


def run(given: argparse.Namespace) -> int:
    """Write both files and print where they are; return 0, or 1 when the store is damaged."""
    from dspark_store.inspection.stats.survey import measure_store
    from dspark_store.precompute.undo import new_folders_undone
    from dspark_store.readers.cache import open_cache

    rules = _rules(given)
    workers = workers_of(given)
    store = Path(given.store).absolute()  # the workers of a cluster may have been started elsewhere
    output = _output(store, given.output)
    try:
        cache = open_cache(store, allow_incomplete=True, allow_reduced_depth=True)
        with new_folders_undone(output):  # a place that cannot be written to is told of before the pass, not after it
            output.mkdir(parents=True, exist_ok=True)
            decode = _decoder(cache, given.tokenizer)
            statistics = measure_store(cache, rules, workers=workers, decode=decode)
    except DamagedStoreError as error:
        raise DamagedStoreError(f"{error}; dspark-store verify lists all that is wrong") from error
    written = [output / JSON_NAME]
    _write(written[0], json.dumps(statistics, indent=1, allow_nan=False) + "\n")
    page = _page(statistics)
    if page is None:
        (output / PAGE_NAME).unlink(missing_ok=True)  # it would be of another pass
    else:
        written.append(output / PAGE_NAME)
        _write(written[1], page)
    say(*_lines(statistics), f"written: {', '.join(map(str, written))}")
    return 0


def _lines(statistics: Mapping[str, Any]) -> list[str]:
    """Return a few lines with the most important figures."""
    from dspark_store.inspection.stats.figures import figure_text

    store, lengths, vocabulary = statistics["store"], statistics["lengths"], statistics["vocabulary"]
    share = figure_text(statistics["supervision"]["share"], "percent")
    counts = f"{figure_text(lengths['samples'])} samples, {figure_text(lengths['tokens'])} tokens, {share} supervised"
    lines = [f"{counts}, {figure_text(vocabulary['all']['used'])} token ids used"]
    if store["phase"] != "complete":
        captured, shards = figure_text(store["captured_shards"]), figure_text(store["shards"])
        lines.append(f"growing: the states of {captured} of {shards} shards are captured")
    states = [(f"layer {layer['layer_id']}", layer) for layer in statistics["layers"]]
    last = statistics["last_hidden_states"]
    if last is not None and last["same_objects_as_layer"] is None:
        states.append(("last hidden states", last))
    return lines + [
        f"{label}: norm {figure_text(figures['norm']['mean'])} "
        f"(median {figure_text(figures['norm']['quantiles']['p50'])}), "
        f"{figure_text(figures['channels']['outliers']['count'])} outlier channels, "
        f"{figure_text(figures['nonfinite']['values'])} values not finite"
        for label, figures in states
    ]


def _page(statistics: Mapping[str, JsonValue]) -> str | None:
    """Return the page; None, with a line that says what it needs, where matplotlib is missing."""
    try:
        from dspark_store.inspection.stats.page import render_page
    except ImportError:
        say(f"{PAGE_NAME} needs the package matplotlib: pip install 'dspark-store[plot]'", out=sys.stderr)
        return None
    return render_page(statistics)


def _rules(given: argparse.Namespace) -> Rules:
    from dspark_store.inspection.stats.survey import Rules

    if given.layers is None:
        return Rules(None, True, given.samples, given.seed, given.outlier_factor)
    wrong = [word for word in given.layers if word != _LAST and not word.removeprefix("-").isdecimal()]
    if wrong:
        raise ValueError(f"--layers takes the ids of captured layers, and {_LAST!r}, got {wrong[0]!r}")
    layers = tuple(int(word) for word in given.layers if word != _LAST)
    return Rules(layers, _LAST in given.layers, given.samples, given.seed, given.outlier_factor)


def _output(store: Path, chosen: str | None) -> Path:
    """Return the directory to write to; ValueError when that is in the store, whose files are all accounted for."""
    resolved = store.resolve()
    output = Path(chosen) if chosen is not None else resolved.with_name(f"{resolved.name}-stats")
    if output.resolve().is_relative_to(resolved):
        raise ValueError(f"--output {output} is inside the store: choose a directory outside of it")
    return output


def _decoder(cache: Cache, chosen: str | None) -> Decode | None:
    """Return what turns ids into texts: the tokenizer that was chosen, or the target's where it is on this machine."""
    from dspark_store.inspection.samples import find_tokenizer

    found = find_tokenizer(cache.manifest, chosen)
    if found.note:
        say(found.note, out=sys.stderr)
    tokenizer = found.tokenizer
    if tokenizer is None:
        return None

    def decode(ids: Sequence[int]) -> list[str]:
        return [str(tokenizer.decode([token])) for token in ids]

    return decode


def _write(path: Path, text: str) -> None:
    """Write a file whole: who reads it meanwhile sees the old one. What is no Unicode in a path becomes "?"."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # nobody can have put a link there
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)
