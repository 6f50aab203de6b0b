"""``dspark-store tokens``: what a target would be run over, before anything is captured."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from typing import TextIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from dspark_store.commands.terminal import Colours, decoder, masked_text
from dspark_store.precompute.config import add_flags
from dspark_store.precompute.progress import Progress
from dspark_store.precompute.refusals import source_reports
from dspark_store.sources.blend import Blend
from dspark_store.sources.options import ChatOptions, option_values, options_of
from dspark_store.sources.registry import build_source
from dspark_store.sources.report import Reporting
from dspark_store.sources.source import Sample, Source, SourceError
from dspark_store.sources.specs import SourceContext, parse_source, read_words
from dspark_store.sources.template import apply_chat_template_option
from dspark_store.target.load import load_target_config, load_tokenizer, text_config
from dspark_store.target.source import TargetSource

FIRST_SAMPLES = 3
_ROWS_A_STEP = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "data", nargs="+", help="files, globs or datasets of conversations, or any source as a configuration has it"
    )
    parser.add_argument(
        "--tokenizer", "--target-model", dest="model", required=True, help="the target: its tokenizer is used"
    )
    parser.add_argument("--rows", type=int, nargs="+", help="rows to show, counted from 0; the first three otherwise")
    parser.add_argument("--report", action="store_true", help="read the whole source and tell what became of its rows")
    parser.add_argument("--chat-template", help="a chat template, inline Jinja, a file or a name")
    parser.add_argument("--seq-length", type=int, default=2048, help="the most tokens a sample has")
    parser.add_argument("--split", help="a slice of the rows, name[a:b], taken after the shuffle")
    parser.add_argument("--shuffle-seed", type=int, help="seed of the order of rows; without it, that of the data")
    parser.add_argument("--max-samples", type=int, help="at most this many rows, after shuffle and split")
    add_flags(parser, {option.name: option for option in fields(ChatOptions)})
    parser.add_argument("--num-workers", type=int, default=0, help="processes that tokenise; 0 tokenises in this one")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")


def run(given: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print the samples that were asked for, or the report of the whole source; return 0.

    Args:
        given: the arguments.
        out: where to print; standard output by default. Supervised text is coloured if it is a terminal.

    Raises:
        ValueError: something a user can mend, such as a row that cannot be used or, after the report, too many.

    """
    out = out or sys.stdout
    target = TargetSource(given.model, given.trust_remote_code)
    tokenizer = load_tokenizer(target)
    context = _context(given, tokenizer, _vocab_size(target, tokenizer))
    source = build_source(parse_source(read_words(given.data)), context)
    if given.report:
        _print_report(source, out)
        options = options_of(given)
        _refuse(source, 0.0 if options.on_bad_row == "error" else options.max_refused)
        return 0
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


def _context(given: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> SourceContext:
    def with_template() -> PreTrainedTokenizerBase:
        apply_chat_template_option(tokenizer, given.chat_template)
        return tokenizer

    options = options_of(given)
    if given.report:  # which tells what is wrong with them all
        options = replace(options, on_bad_row="skip", max_refused=1.0)
    return SourceContext(
        seq_length=given.seq_length,
        load_tokenizer=with_template,
        vocab_size=vocab_size,
        split=given.split,
        shuffle_seed=given.shuffle_seed,
        max_samples=given.max_samples,
        num_workers=given.num_workers if given.report else 0,
        **option_values(options),
    )


def _print_sample(title: str, sample: Sample, tokenizer: PreTrainedTokenizerBase, out: TextIO) -> None:
    supervised = int(sample.loss_mask.sum())
    print(f"{title}: {len(sample.input_ids):,} tokens, {supervised:,} supervised", file=out)
    text = masked_text(sample.input_ids, sample.loss_mask, decoder(tokenizer), Colours(out))
    print(f"{text}\n", file=out)


def _places(source: Source, record: int) -> list[str]:
    """Return the parts of blends that a record is of, the outermost first, and its place there, if that is known."""
    if isinstance(source, Blend):
        number, own = source.part_of(record)
        part = source.parts[number]
        return [f"part {part.name}", *_places(part.source, own)]
    return [source.where(record)] if isinstance(source, Reporting) else []


def _print_report(source: Source, out: TextIO) -> None:
    counts = np.zeros((len(source.origins()), 3), np.int64)
    passed = 0
    with Progress("tokenise", len(source), "rows") as progress:
        for sample in source.read():
            counts[sample.origin] += (1, len(sample.input_ids), int(sample.loss_mask.sum()))
            record = source.record_of(sample.cursor)
            if record - passed >= _ROWS_A_STEP:
                progress.advance(record - passed)
                passed = record
        progress.advance(len(source) - passed)
    samples, tokens, supervised = counts.sum(axis=0).tolist()
    print(f"{samples:,} samples of {len(source):,} records, {tokens:,} tokens, {supervised:,} supervised", file=out)
    if isinstance(source, Blend):
        for name, (samples, tokens, supervised) in zip(source.origins(), counts.tolist(), strict=True):
            print(f"part {name}: {samples:,} samples, {tokens:,} tokens, {supervised:,} supervised", file=out)
        for share in source.shares():
            if share.repeated or share.left_out:
                print(f"{share}, {share.left_out:,} left out", file=out)
    for name, report in source_reports(source):
        print("", *([f"part {name}"] if name else []), *report.lines(), sep="\n", file=out)


def _refuse(source: Source, max_refused: float) -> None:
    for _, report in source_reports(source):
        if report.refused > max_refused * report.read:
            example = next(iter(report.reasons.values())).examples[0]
            raise SourceError(
                f"{report.refused:,} of {report.read:,} rows cannot be used, more than {max_refused:.2%} (the first: "
                f"{example})"
            )
