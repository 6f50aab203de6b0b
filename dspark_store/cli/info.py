"""``dspark-store info``: what a store is, how far it is and what it takes, on one screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TextIO

from dspark_store.cli.options import DAMAGED
from dspark_store.cli.terminal import Colours, columns, entry
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.sizes import ratio_text
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.summary import ShardRun, Summary, summarise
from dspark_store.sources.identity import chat_rules
from dspark_store.text import say_json, show, size_text, time_text

_RUNS_SHOWN, _DIGEST_SHOWN = 8, 12
_DATA_LABELS = {
    "train_split": "split",
    "shuffle_seed": "shuffle seed",
    "batch_size": "batch size",
    "batch_tokens": "batch tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="the store's directory")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for programs")


def run(given: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print what there is to know of a store; return 1 when something of it is not as it was written, else 0."""
    out = out or sys.stdout
    summary = summarise(LocalStorage(given.store))
    if given.json:
        say_json(asdict(summary), out)
    else:
        show(*screen(summary, columns(), Colours(out)), out=out)
    return DAMAGED if summary.damage else 0


def screen(summary: Summary, width: int, colours: Colours) -> Iterator[str]:
    """Yield the lines that a person reads, none of them wider than ``width`` (from 66 on)."""
    for line in entry("damaged", "; ".join(summary.damage), width) if summary.damage else ():
        yield colours.paint(line, "red")
    if summary.damage:
        yield from entry("", f"find out more: dspark-store verify {summary.place}", width)
    for note in summary.notes:
        yield from (colours.paint(line, "yellow") for line in entry("note", note, width))
    head, *rest = entry("store", f"{summary.place}, {_phase(summary)}", width)
    yield colours.paint(head, "green" if summary.complete else "yellow")
    yield from rest
    for name, text in (*_progress(summary), *_samples(summary)):
        yield from entry(name, text, width)
    yield from _histogram(summary, width)
    yield ""
    yield from entry("layers", _layers(summary), width)
    yield from _columns(summary, colours)
    for name, text in (*_counted(summary), *_comparison(summary), *_making(summary)):
        yield from entry(name, text, width)


def _phase(summary: Summary) -> str:
    if summary.complete:
        return "complete"
    return "tokens still being written" if summary.phase == "tokens" else "incomplete: states are missing"


def _progress(summary: Summary) -> Iterator[tuple[str, str]]:
    shards, writer, to_come = summary.shards, summary.writer, summary.to_come
    yield "id", summary.store_id
    if writer is not None:
        since = "" if writer.taken is None else f" since {datetime.fromtimestamp(writer.taken, UTC):%Y-%m-%d %H:%M} UTC"
        life = f"last sign of life {time_text(writer.age_seconds)} ago"
        stale = ": STALE, the next job will take it over" if writer.stale else ""
        yield "writer", f"process {writer.pid} on {writer.host}{since}, {life}{stale}"
    if summary.complete:
        yield "shards", f"{shards.states:,} of up to {shards.size:,} samples, all there"
        return
    if shards.total is None:
        states = f", {shards.states:,} with states" if shards.states else ""
        yield (
            "shards",
            f"{shards.tokens:,} so far, of up to {shards.size:,} samples{states}; more may come",
        )
    else:
        yield "shards", f"{shards.states:,} of {shards.total:,} have states, up to {shards.size:,} samples each"
        yield "missing", _runs(summary.shards.missing, copied=summary.copied)
    if to_come is not None and summary.phase != "tokens":
        tokens = summary.samples.tokens or 0
        least, most = size_text(to_come.least_bytes), size_text(to_come.most_bytes)
        size = f"about {least}" if least == most else f"{least} to {most}"
        share = 1 - to_come.tokens / tokens if tokens else 0.0
        yield "done", f"{share:.1%} of the tokens; {size} to come, {size_text(to_come.free_bytes)} free on the disk"


def _runs(runs: Sequence[ShardRun], *, copied: bool) -> str:
    if not runs:
        again = "the same rechunk again" if copied else "the precompute again with --resume"
        return f"no shard; run {again} to declare the store complete"
    count = sum(run.last - run.first + 1 for run in runs)
    named = [f"{run.first}" if run.first == run.last else f"{run.first}-{run.last}" for run in runs[:_RUNS_SHOWN]]
    more = f" and {len(runs) - _RUNS_SHOWN:,} more runs" if len(runs) > _RUNS_SHOWN else ""
    return f"{count:,} shard{'s' if count > 1 else ''}: {', '.join(named)}{more}"


def _samples(summary: Summary) -> Iterator[tuple[str, str]]:
    samples, lengths = summary.samples, summary.samples.lengths
    about = "" if samples.counted == samples.count else "about "
    yield "samples", _with_lengths(summary)
    if samples.tokens is None:
        yield "tokens", "unknown"
    elif samples.supervised is None:
        yield "tokens", f"{about}{samples.tokens:,}"
    else:
        share = samples.supervised / max(1, samples.tokens)
        none = f"; {samples.unsupervised_samples:,} samples have none" if samples.unsupervised_samples else ""
        yield "tokens", f"{about}{samples.tokens:,}, {about}{samples.supervised:,} supervised ({share:.1%}){none}"
    if about and lengths is not None:
        yield "", f"lengths are those of {samples.counted:,} samples, of a few shards"
    if samples.nonfinite:
        yield "nonfinite", f"{samples.nonfinite:,} samples have states that are not finite; training leaves them out"
    for source in summary.sources:
        supervised = source.supervised / max(1, source.tokens)
        text = f"{source.samples:,} samples, {source.tokens:,} tokens ({source.token_share:.1%} of all)"
        yield "source", f"{source.name}: {text}, {supervised:.1%} supervised"


def _with_lengths(summary: Summary) -> str:
    count, lengths, limit = summary.samples.count, summary.samples.lengths, summary.layout.seq_length
    if lengths is None:
        return f"{count:,}"
    text = f"{count:,} of {lengths.shortest:,} to {lengths.longest:,} tokens, mean {lengths.mean:,.0f}, median "
    at_limit = f"; {lengths.at_limit:,} at the limit of {limit:,}" if lengths.at_limit else f"; limit {limit:,}"
    return f"{text}{lengths.median:,}{at_limit}"


def _histogram(summary: Summary, width: int) -> Iterator[str]:
    bins = () if summary.samples.lengths is None else summary.samples.lengths.histogram
    if not bins:
        return
    most = max(part.samples for part in bins)
    labels = [f"{part.first:,}" + (f"-{part.last:,}" if part.last > part.first else "") for part in bins]
    left, right = max(map(len, labels)), len(f"{most:,}")
    room = max(8, min(40, width - 12 - left - right))
    yield ""
    for number, (label, part) in enumerate(zip(labels, bins, strict=True)):
        name = "length" if number == 0 else ""
        yield f"{name:<10}{label:>{left}} {part.samples:>{right},} {bar(part.samples / most, room)}".rstrip()


def bar(share: float, room: int) -> str:
    """Return a bar of eighths of a column that fills a share, 0 to 1, of a room; what is not 0 is seen."""
    whole, eighth = divmod(max(round(share * room * 8), 1 if share > 0 else 0), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighth].strip()


def _layers(summary: Summary) -> str:
    layout = summary.layout
    ids = ", ".join(map(str, layout.layer_ids)) if layout.layer_ids else f"{layout.num_layers}, not named yet"
    chunk = f"chunks of {layout.chunk_tokens:,} tokens"
    return f"{ids}; {layout.hidden_size:,} wide, {layout.values}, codec {layout.codec}, {chunk}"


def _columns(summary: Summary, colours: Colours) -> Iterator[str]:
    yield colours.paint(f"{'':<10}{'column':<27}{'valid':>11}{'stored':>11}{'of rows':>9}", "bold")
    for column in (*summary.columns, summary.together):
        logical = "?" if column.logical_bytes is None else size_text(column.logical_bytes)
        ratio = "" if column.of_ragged_rows is None else f"{column.of_ragged_rows:.3f}"
        yield f"{'':<10}{column.name:<27}{logical:>11}{size_text(column.stored_bytes):>11}{ratio:>9}"


def _counted(summary: Summary) -> Iterator[tuple[str, str]]:
    shared = [layer.layer_id for layer in summary.layers if layer.shared]
    if shared:
        name = "a layer" if shared[0] is None else f"layer {shared[0]}"
        yield "", f"{name} is the last hidden state itself: stored once, counted there"
    for counted, committed, what in (
        (summary.shards.counted_tokens, summary.shards.tokens, "tokens"),
        (summary.shards.counted_states, summary.shards.states, "states"),
    ):
        if counted < committed:
            yield "", f"sizes of {what} are extrapolated from {counted:,} of {committed:,} shards"


def _comparison(summary: Summary) -> Iterator[tuple[str, str]]:
    compared = summary.comparison
    if compared is not None:
        vectors, limit, dtype = len(summary.layers), summary.layout.seq_length, summary.layout.dtype
        of = "" if summary.complete else f" for the {compared.samples:,} samples with states"
        yield "size", f"{size_text(compared.stored_bytes)}{of}"
        ours, padded = (
            ratio_text(ratio, vectors) for ratio in (compared.stored_of_ragged_rows, compared.padded_of_ragged_rows)
        )
        yield "", f"{ours}, {size_text(compared.ragged_bytes)}"
        yield "padded", f"{size_text(compared.padded_bytes)}: {vectors} {dtype} vectors at {limit:,} positions"
        yield "", padded
    beside = [f"{group.name} {size_text(group.bytes)}" for group in summary.beside if group.files]
    yield "beside", ", ".join(beside)
    for line in summary.links.lines():
        yield "links", line


def _making(summary: Summary) -> Iterator[tuple[str, str]]:
    manifest, config = summary.manifest, summary.target_config or {}
    if manifest:
        brief = [f"{manifest.get('target_model_type')}", f"{manifest.get('num_hidden_layers')} layers"]
        brief += [f"vocabulary {manifest.get('target_vocab_size')}"]
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
        brief += [f"{heads} heads" + (f" in {groups} groups" if groups else "")] if heads else []
        brief += ["tied head"] if summary.head.get("tied") else []
        yield "target", f"{manifest.get('target_model')} ({', '.join(brief)}){_digest(manifest, 'target_weights')}"
        yield "data", _data(manifest)
    for producer in summary.producers[-3:]:
        yield "made", _producer(producer)
    if len(summary.producers) > 3:
        yield "", f"and {len(summary.producers) - 3} earlier jobs"


def _data(manifest: Mapping[str, JsonValue]) -> str:
    source = manifest.get("source")
    options = dict(source) if isinstance(source, Mapping) else {}
    text = f"{manifest.get('train_data_path')} ({options.get('type', 'unknown source')})"
    for name, label in _DATA_LABELS.items():
        if manifest.get(name) is not None:
            text += f", {label} {manifest[name]}"
    rules = chat_rules(source)
    if rules:
        text += f", rule{'s' if len(rules) > 1 else ''} {' and '.join(map(str, rules))} for conversations"
    return text + _digest(options, "content_sha256")


def _digest(fields: Mapping[str, JsonValue], name: str) -> str:
    return f", {name} {str(fields[name])[:_DIGEST_SHOWN]}" if fields.get(name) else ""


def _producer(producer: Mapping[str, JsonValue]) -> str:
    parts = [
        f"{producer.get('device')} on {producer.get('host')}",
        f"class {producer.get('equality_class', 'unknown')}",
    ]
    ranks = producer.get("world_size", 1)
    parts += [f"{ranks} rank{'' if ranks == 1 else 's'} {producer.get('parallel', '')}".rstrip()]
    parts += [f"{name} {producer[name]}" for name in ("torch", "transformers") if name in producer]
    rate, tokens = producer.get("tokens_per_second"), producer.get("tokens")
    if isinstance(rate, int | float) and isinstance(tokens, int):
        parts.append(f"{tokens:,} tokens at {rate:,.0f}/s")
    else:
        parts.append("did not end well, or still runs")
    return ", ".join(parts)
