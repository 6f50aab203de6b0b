"""``dspark-store estimate``: how large a store will be, and how long its capture takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dspark_store.cli.precompute import add_arguments as add_precompute_arguments
from dspark_store.cli.precompute import config_of
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.sizes import of_ragged_rows, of_rows_text, padded_bytes, ragged_once_bytes, ragged_rows_bytes
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.settings import PrecomputeConfig, settings
from dspark_store.settings import flag
from dspark_store.text import say, say_json, size_text, time_text

if TYPE_CHECKING:
    from dspark_store.inspection.estimate.estimation import Bytes, PartEstimate
    from dspark_store.inspection.estimate.forecast import Forecast

MEASURED_ROWS = 32
_OF_A_STORE = ("codec", "mantissa_bits", "chunk_tokens", "target_layer_ids", "tokens_per_second")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command: its own, and every setting of a precompute."""
    parser.add_argument(
        "data", nargs="*", help="what --input-data takes: files, globs or datasets, or any other source"
    )
    parser.add_argument("--store", help="go by the lengths and states of this store, finished or growing")
    parser.add_argument(
        "--measure",
        type=int,
        default=MEASURED_ROWS,
        metavar="N",
        help=f"rows to run through the target and encode, {MEASURED_ROWS} by default; 0 loads no target and goes by a "
        "table of ratios",
    )
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    add_precompute_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Print the estimate; return 0."""
    if given.measure < 0:
        raise ValueError(f"measure must be >= 0, got {given.measure}")
    forecast = _of_store(given) if given.store else _of_job(given)
    if given.json:
        say_json(_document(forecast))
        return 0
    say(*_lines(forecast))
    return 0


def estimate_precompute(config: PrecomputeConfig) -> int:
    """Print the estimate of a precompute with ``--estimate``, on rank 0, from a table of ratios; return 0."""
    from dspark_store.inspection.estimate.forecast import forecast_job
    from dspark_store.precompute.job import existing_record
    from dspark_store.precompute.ranks import join_world

    with join_world(60 * config.timeout_minutes) as world:
        if world.leads:
            recorded = existing_record(LocalStorage(config.output_dir), resume=True)
            say(*_lines(forecast_job(config, 0, recorded)))
    return 0


def _of_job(given: argparse.Namespace) -> Forecast:
    flags = {name: value for name, value in vars(given).items() if name in settings()}
    if given.data and given.input_data:
        raise ValueError("the data is given twice: as arguments and with --input-data")
    from dspark_store.inspection.estimate.forecast import forecast_job

    flags["input_data"] = given.data or given.input_data
    return forecast_job(config_of(given.config, flags, output_dir="."), given.measure)


def _of_store(given: argparse.Namespace) -> Forecast:
    flags = {name: value for name, value in vars(given).items() if name in settings() and value is not None}
    others = [f"--{flag(name)}" for name in flags if name not in _OF_A_STORE]
    others += ["data"] if given.data else []
    if others or given.config:
        known = ", ".join(f"--{flag(name)}" for name in _OF_A_STORE)
        raise ValueError(f"{(others or ['--config'])[0]} cannot be given with --store, which takes {known} only")
    from dspark_store.inspection.estimate.forecast import StoreChoice, forecast_store
    from dspark_store.readers.cache import open_cache

    cache = open_cache(given.store, allow_incomplete=True, allow_reduced_depth=True)
    choice = StoreChoice(
        codec=given.codec,
        mantissa_bits=given.mantissa_bits,
        chunk_tokens=given.chunk_tokens,
        layer_ids=given.target_layer_ids,
        tokens_per_second=given.tokens_per_second,
    )
    return forecast_store(cache, choice, given.measure)


def _lines(forecast: Forecast) -> Iterator[str]:
    corpus, chosen, counts = forecast.corpus, forecast.chosen, forecast.counts
    states = chosen.columns[2:]
    before = sum(part.before for part in states)
    supervised = "" if corpus.supervised is None else f" ({int(corpus.supervised.sum()):,} supervised)"
    cut, unsupervised = ("none", "not counted: no row had to be read") if counts is None else counts.lines()
    yield f"samples            {len(corpus):,} (mean {corpus.tokens / max(1, len(corpus)):.0f} tokens)"
    yield f"tokens             {corpus.tokens:,}{supervised}"
    yield f"cut at seq-length  {cut}"
    yield f"unsupervised       {unsupervised}"
    exact = f"{before:,} bytes = {size_text(before)}"
    yield f"states, exact      {exact} before compression ({len(states)} vectors per token)"
    yield (
        f"states, expected   {_size(chosen.states)} as {chosen.schema.values}, codec {chosen.variant.codec}, "
        f"{chosen.schema.chunk_tokens} tokens per chunk"
    )
    yield f"tables             {_size(chosen.tables.stored)}: the target's embedding and head"
    yield f"store              {_size(chosen.total)}, and a few KB of metadata per shard"
    yield f"basis              {forecast.basis}"
    yield f"disk free          {size_text(forecast.free)}"
    yield f"time               {_time(forecast)}"
    yield ""
    yield from _part_lines(forecast)
    yield ""
    yield from _variant_lines(forecast)
    yield ""
    yield from _elsewhere_lines(forecast)


def _part_lines(forecast: Forecast) -> Iterator[str]:
    chosen = forecast.chosen
    yield f"{'part':34} {'before':>10}  {'stored':>10}  {'':23} {'of rows':>7}  share"
    for part in (*chosen.columns, chosen.tables):
        ratio = _ratio(forecast, part)
        share = part.stored.expected / chosen.total.expected
        spread = _spread(part.stored)
        yield (
            f"{part.label:34} {size_text(part.before):>10}  {size_text(part.stored.expected):>10}  {spread:23} "
            f"{'' if ratio is None else f'{ratio:.3f}':>7} {share:6.1%}"
        )


def _ratio(forecast: Forecast, part: PartEstimate) -> float | None:
    """Return what a column is of the ragged bf16 rows; the target's tables are none of theirs."""
    if part is forecast.chosen.tables:
        return None
    return of_ragged_rows(forecast.chosen.schema, forecast.corpus.tokens, part.stored.expected)


def _variant_lines(forecast: Forecast) -> Iterator[str]:
    dtypes = list(dict.fromkeys(variant.values for variant in forecast.stores))
    yield f"{'the whole store, by codec':34} " + "  ".join(f"{dtype:>10}" for dtype in dtypes)
    for codec in dict.fromkeys(variant.codec for variant in forecast.stores):
        totals = {variant.values: found.total for variant, found in forecast.stores.items() if variant.codec == codec}
        yield f"{codec:34} " + "  ".join(f"{size_text(totals[dtype].expected):>10}" for dtype in dtypes)


def _elsewhere_lines(forecast: Forecast) -> Iterator[str]:
    schema, tokens = forecast.chosen.schema, forecast.corpus.tokens
    here = sum(part.stored.expected for part in forecast.chosen.columns)
    for name, count in {"the samples here": here, **_elsewhere(forecast)}.items():
        yield f"{name:34} {size_text(count):>10}  {of_rows_text(schema, tokens, count)}"


def _elsewhere(forecast: Forecast) -> dict[str, int]:
    """Return the bytes of the samples in other layouts, which do not keep the target's tables."""
    schema, tokens = forecast.chosen.schema, forecast.corpus.tokens
    return {
        "padded safetensors": padded_bytes(schema, len(forecast.corpus)),
        "ragged rows": ragged_rows_bytes(schema, tokens),
        "ragged rows, the last state once": ragged_once_bytes(schema, forecast.record.last_layer, tokens),
    }


def _time(forecast: Forecast) -> str:
    duration = forecast.duration
    if duration is None:
        return "unknown: give --tokens-per-second, or let dspark-store estimate --measure some rows"
    rate = forecast.corpus.tokens / duration.seconds if duration.seconds else 0.0
    text = f"{time_text(duration.seconds)} at {rate:,.0f} tokens/s, {forecast.rate_basis}"
    if duration.encode is not None and duration.encode > duration.forward:
        text += f"; the codec holds the target up, which alone takes {time_text(duration.forward)}"
    return text


def _size(count: Bytes) -> str:
    spread = _spread(count)
    return f"{size_text(count.expected)} ({spread})" if spread else size_text(count.expected)


def _spread(count: Bytes) -> str:
    """Return a range as people read it; one row of many tells none, and what is exact has none."""
    if math.isinf(count.most):
        return "range unknown"
    return f"{size_text(count.least)} to {size_text(count.most)}" if count.most > count.least else ""


def _document(forecast: Forecast) -> dict[str, JsonValue]:
    corpus, chosen, duration = forecast.corpus, forecast.chosen, forecast.duration
    return {
        "samples": len(corpus),
        "tokens": corpus.tokens,
        "supervised": None if corpus.supervised is None else int(corpus.supervised.sum()),
        "cut": None if forecast.counts is None else forecast.counts.cut,
        "perhaps_cut": None if forecast.counts is None else forecast.counts.perhaps_cut,
        "unsupervised_samples": None if forecast.counts is None else forecast.counts.unsupervised,
        "measured_rows": forecast.measured_rows,
        "basis": forecast.basis,
        "codec": chosen.variant.codec,
        "dtype": chosen.variant.dtype,
        "mantissa_bits": chosen.variant.mantissa_bits,
        "chunk_tokens": chosen.schema.chunk_tokens,
        "store_bytes": _range(chosen.total),
        "state_bytes": _range(chosen.states),
        "parts": [_part_document(part, forecast) for part in (*chosen.columns, chosen.tables)],
        "variants": [
            {**variant._asdict(), "store_bytes": _range(found.total)} for variant, found in forecast.stores.items()
        ],
        "elsewhere_bytes": {name.replace(",", "").replace(" ", "_"): n for name, n in _elsewhere(forecast).items()},
        "free_bytes": forecast.free,
        "seconds": None if duration is None else duration.seconds,
        "forward_seconds": None if duration is None else duration.forward,
        "encode_seconds": None if duration is None else duration.encode,
    }


def _part_document(part: PartEstimate, forecast: Forecast) -> dict[str, JsonValue]:
    return {
        "part": part.name,
        "layer_id": part.layer_id,
        "before_bytes": part.before,
        "stored_bytes": _range(part.stored),
        "of_ragged_rows": _ratio(forecast, part),
        "share": part.stored.expected / forecast.chosen.total.expected,
    }


def _range(count: Bytes) -> dict[str, JsonValue]:
    """Return a range as JSON; its end is null where one row of many was measured, which tells none."""
    most = None if math.isinf(count.most) else round(count.most)
    return {"expected": round(count.expected), "least": round(count.least), "most": most}
