"""What a target would be run over: samples as text, a report of a source, or its comparison with a store."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TextIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from dspark_store.cli.terminal import MARKS_NOTE, Colours, decoder, masked_text
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import read_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.token_diff import TokenPair, other_fields, pair_tokens, recorded_options
from dspark_store.precompute.tokenise import source_reports
from dspark_store.progress import start_progress
from dspark_store.sources.blend import Blend
from dspark_store.sources.chat import ChatSource
from dspark_store.sources.identity import chat_rules, chat_template_sha256, tokenizer_sha256
from dspark_store.sources.options import DEFAULT_OPTIONS, ChatOptions, option_values, options_of
from dspark_store.sources.registry import SourceContext, build_source, parse_source, read_words
from dspark_store.sources.source import Reporting, Sample, Source, SourceError
from dspark_store.sources.template import apply_chat_template_option
from dspark_store.target.load import load_target_config, load_tokenizer, text_config
from dspark_store.target.source import TargetSource
from dspark_store.text import say, show

FIRST_SAMPLES = 3
_SEQ_LENGTH = 2048
_TOKENS_BEFORE, _TOKENS_AFTER, _IDS_SHOWN = 24, 40, 8


def show_tokens(given: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print the samples that were asked for, the report of the whole source, or its comparison with a store; return 0.

    Args:
        given: the arguments.
        out: where to print; standard output by default. Supervised text is coloured if it is a terminal, else marked.

    Raises:
        ValueError: something a user can mend, such as a row that cannot be used or, after the report, too many.

    """
    out = out or sys.stdout
    if given.compare is not None:
        _compare(given, out)
        return 0
    if not given.data or not given.model:
        raise ValueError(f"required but not given: {'--target-model' if given.data else 'the data'}")
    tokenizer, source = _open(given, options_of(given), out)
    if given.report:
        _print_report(source, out)
        options = options_of(given)
        _refuse(source, 0.0 if options.on_bad_row == "error" else options.max_refused)
        return 0
    if not Colours(out).shown:
        say(MARKS_NOTE, "", out=out)
    for record in given.rows if given.rows is not None else range(min(FIRST_SAMPLES, len(source))):
        if not 0 <= record < len(source):
            raise SourceError(f"row {record} is not there; there are {len(source):,} rows, counted from 0")
        place = ", ".join(_places(source, record))
        title = f"row {record} ({place})" if place else f"row {record}"
        _print_sample(title, source.sample(record), tokenizer, out)
    return 0


def _vocab_size(target: TargetSource, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many ids the target knows, which a precompute goes by, or those of a tokenizer without a target."""
    try:
        return int(text_config(load_target_config(target)).vocab_size)
    except ValueError:
        return len(tokenizer)


def _open(
    given: argparse.Namespace, options: ChatOptions, out: TextIO, recorded: Mapping[str, JsonValue] | None = None
) -> tuple[PreTrainedTokenizerBase, Source]:
    """Return the target's tokenizer, with the chat template that is asked for, and the source."""
    target = TargetSource(given.model, given.trust_remote_code)
    tokenizer = load_tokenizer(target)

    def with_template() -> PreTrainedTokenizerBase:
        if given.chat_template is not None:
            apply_chat_template_option(tokenizer, given.chat_template)
        return tokenizer

    reads_all = given.report or given.compare is not None
    if reads_all:  # and tells of the rows that are no use
        options = replace(options, on_bad_row="skip", max_refused=1.0)
    context = SourceContext(
        seq_length=_SEQ_LENGTH if given.seq_length is None else given.seq_length,
        load_tokenizer=with_template,
        vocab_size=_vocab_size(target, tokenizer),
        split=given.split,
        shuffle_seed=given.shuffle_seed,
        max_samples=given.max_samples,
        num_workers=given.num_workers if reads_all else 0,
        recorded=recorded,
        **option_values(options),
    )
    source = build_source(parse_source(read_words(given.data)), context)
    if context.template_date is None and context.today in _dates(source):
        show(
            f"the chat template asks the clock, and is told today's date, {context.today}; a store keeps the date "
            "of its first run, or --template-date\n",
            out=out,
        )
    return tokenizer, source


def _dates(source: Source) -> set[str | None]:
    """Return the dates that the templates of a source, or of a blend's parts, are told."""
    if isinstance(source, Blend):
        return {date for part in source.parts for date in _dates(part.source)}
    return {source.template_date} if isinstance(source, ChatSource) else set()


def _compare(given: argparse.Namespace, out: TextIO) -> None:
    """Print how many samples of a store would be others today, and the first of them."""
    storage = LocalStorage(given.compare)
    record = read_metadata(storage).record
    options = _as_stored(given, record)
    made_from = record.manifest["source"]
    dated = made_from if isinstance(made_from, Mapping) and 1 not in chat_rules(made_from) else None  # rule 1 kept none
    tokenizer, source = _open(given, options, out, dated)
    _check_same(record, source, tokenizer, given.compare)
    counted = Counter[str]()
    shown: list[TokenPair] = []
    with start_progress("tokenise", len(source), "rows") as progress:
        for pair in pair_tokens(storage, record, source):
            counted[pair.difference] += 1
            if pair.difference and len(shown) < FIRST_SAMPLES:
                shown.append(pair)
            if pair.today is not None:
                progress.reach(source.record_of(pair.today.cursor), lambda: "")
    differing, total = counted.total() - counted[""], counted.total()
    rules = [
        " and ".join(map(str, chat_rules(identity))) for identity in (record.manifest["source"], source.identity())
    ]
    if rules[0]:
        say(f"rule of the store's conversations: {rules[0]}, of this version: {rules[1]}", out=out)
    say(f"{differing:,} of {total:,} samples ({differing / max(1, total):.1%}) would be others today", out=out)
    for difference, count in sorted(counted.items()):
        if difference:
            say(f"  {count:,}: {difference}", out=out)
    for pair in shown:
        _print_pair(pair, source, tokenizer, out)
    for _, report in source_reports(source):
        for reason in report.reasons.values():
            show(f"\n{reason.count:,} rows cannot be used today, such as {reason.examples[0]}", out=out)


def _as_stored(given: argparse.Namespace, record: StoreRecord) -> ChatOptions:
    """Fill what is not given with what a store says; return the options of conversations."""
    manifest = record.manifest
    if not manifest.get("source"):
        raise ValueError(f"the store at {given.compare} does not say what it was made from: no precompute made it")
    recorded = recorded_options(manifest)
    given.data = given.data or [str(manifest.get("train_data_path"))]
    given.model = given.model or manifest.get("target_model")
    given.seq_length = record.schema.seq_length if given.seq_length is None else given.seq_length
    for name in ("split", "shuffle_seed", "max_samples"):
        if getattr(given, name) is None:
            setattr(given, name, recorded.get(name))
    flags = {name: value for name in option_values(DEFAULT_OPTIONS) if (value := getattr(given, name)) is not None}
    known = {name: value for name, value in recorded.items() if name in option_values(DEFAULT_OPTIONS)}
    return ChatOptions(**{**known, **flags})


def _check_same(record: StoreRecord, source: Source, tokenizer: PreTrainedTokenizerBase, store: str) -> None:
    """Raise ValueError unless a source has the rows of a store, under its template; warn of another tokenizer."""
    manifest = record.manifest
    others = other_fields(manifest["source"], source.identity())
    if others:
        raise ValueError(
            f"this is not the data of {store}, or not under its options: {'; '.join(others)}; give both as they were"
        )
    has_chats = bool(chat_rules(manifest["source"]))
    if has_chats and manifest.get("chat_template_sha256") != chat_template_sha256(tokenizer):
        raise ValueError(f"the chat template is not the one that {store} was made with: give that with --chat-template")
    if manifest.get("tokenizer_sha256") != tokenizer_sha256(tokenizer):
        say(f"note: the tokenizer is not the one that {store} was made with", out=sys.stderr)


def _print_pair(pair: TokenPair, source: Source, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
    """Print where two samples begin to differ, as text with marks around what is supervised, and as ids."""
    place = "" if pair.today is None else ", ".join(_places(source, source.record_of(pair.today.cursor - 1)))
    number = "a new sample" if pair.stored is None else f"sample {pair.stored.number}"
    show(f"\n{number}{f' ({place})' if place else ''}: {pair.difference}, from token {pair.first} on", out=out)
    for name, sample in (("store", pair.stored), ("today", pair.today)):
        if sample is None:
            say(f"{name}  none", out=out)
            continue
        window = slice(max(0, pair.first - _TOKENS_BEFORE), pair.first + _TOKENS_AFTER)
        ids, mask = sample.input_ids[window], sample.loss_mask[window]
        text = masked_text(ids, mask, decoder(tokenizer), Colours(out))
        before, after = "…" if window.start else "", "…" if window.stop < len(sample.input_ids) else ""
        show(f"{name}  {before}{text}{after}", out=out)
        if not pair.same_ids:
            say(f"       ids {sample.input_ids[pair.first : pair.first + _IDS_SHOWN].tolist()}", out=out)


def _print_sample(title: str, sample: Sample, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
    supervised = int(sample.loss_mask.sum())
    say(f"{title}: {len(sample.input_ids):,} tokens, {supervised:,} supervised", out=out)
    text = masked_text(sample.input_ids, sample.loss_mask, decoder(tokenizer), Colours(out))
    show(f"{text}\n", out=out)


def _places(source: Source, record: int) -> list[str]:
    """Return the parts of blends that a record is of, the outermost first, and its place there, if that is known."""
    if isinstance(source, Blend):
        number, own = source.part_of(record)
        part = source.parts[number]
        return [f"part {part.name}", *_places(part.source, own)]
    return [source.where(record)] if isinstance(source, Reporting) else []


def _print_report(source: Source, out: TextIO) -> None:
    counts = np.zeros((len(source.origins()), 3), np.int64)
    with start_progress("tokenise", len(source), "rows") as progress:
        for sample in source.read():
            counts[sample.origin] += (1, len(sample.input_ids), int(sample.loss_mask.sum()))
            progress.reach(source.record_of(sample.cursor), lambda: "")
        progress.reach(len(source), lambda: "")
    samples, tokens, supervised = counts.sum(axis=0).tolist()
    say(f"{samples:,} samples of {len(source):,} records, {tokens:,} tokens, {supervised:,} supervised", out=out)
    if isinstance(source, Blend):
        for name, (samples, tokens, supervised) in zip(source.origins(), counts.tolist(), strict=True):
            say(f"part {name}: {samples:,} samples, {tokens:,} tokens, {supervised:,} supervised", out=out)
        for share in source.shares():
            if share.repeated or share.left_out:
                say(f"{share}, {share.left_out:,} left out", out=out)
    for name, report in source_reports(source):
        say("", *([f"part {name}"] if name else []), *report.lines(), out=out)


def _refuse(source: Source, max_refused: float) -> None:
    for _, report in source_reports(source):
        if report.refused > max_refused * report.read:
            example = next(iter(report.reasons.values())).examples[0]
            raise SourceError(
                f"{report.refused:,} of {report.read:,} rows cannot be used, more than {max_refused:.2%} (the first: "
                f"{example})"
            )
