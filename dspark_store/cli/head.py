"""``dspark-store head``: samples of a store, as text with what is supervised in it, and the norms of their states."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from dspark_store.cli.options import DAMAGED
from dspark_store.cli.terminal import MARKS_NOTE, Colours, Decode, columns, decoder, entry, masked_text
from dspark_store.format.damage import DamagedStoreError
from dspark_store.text import show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark_store.inspection.samples import SampleReader, StateNorms
    from dspark_store.readers.cache import Cache

FIRST_SAMPLES, TOKENS_SHOWN = 3, 256
_TITLES = f"{'layer':>6}{'mean norm':>12}{'least':>11}{'most':>11}{'min value':>12}{'max value':>11}{'not finite':>12}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", help="the store's directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-n", type=int, default=FIRST_SAMPLES, metavar="N", help="show the first N samples (default 3)")
    which.add_argument("--samples", type=int, nargs="+", metavar="I", help="show these samples, counted from 0")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS_SHOWN, help=f"tokens shown of a sample, 0 for all (default {TOKENS_SHOWN})"
    )
    parser.add_argument("--layers", type=int, nargs="*", metavar="ID", help="measure these layers, by id (default all)")
    parser.add_argument("--text-only", action="store_true", help="show no states, and read none")
    parser.add_argument("--tokenizer", help="a model's directory, hub id or GGUF file; else the target is looked for")


def run(given: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print samples; return 1 when something of them is not as it was written, else 0.

    ValueError for samples and layers that the store does not have, and for a tokenizer that cannot be loaded.
    """
    out = out or sys.stdout
    if given.n < 0 or given.tokens < 0:
        raise ValueError(f"-n and --tokens must not be negative, got {min(given.n, given.tokens)}")
    from dspark_store.inspection.samples import SampleReader, find_tokenizer
    from dspark_store.readers.cache import open_cache
    from dspark_store.readers.tensors import chosen_slots

    cache = open_cache(given.store, allow_incomplete=True, allow_reduced_depth=True)
    reader = SampleReader(cache)
    layers = given.layers or None
    chosen_slots(cache.schema, layers)  # an unknown layer is refused before anything is printed
    samples = given.samples if given.samples is not None else range(min(given.n, reader.samples))
    for sample in samples:
        reader.check(sample)
    found = find_tokenizer(cache.manifest, given.tokenizer)
    page = Page(cache, reader, found.tokenizer, layers, given.tokens, Colours(out))
    for line in page.preface(found.note, number=len(samples)):
        show(line, out=out)
    for sample in samples:
        show(*page.sample(sample, states=not given.text_only), "", out=out)
    return DAMAGED if page.damaged else 0


class Page:
    """The lines that are printed of samples. ``damaged`` tells whether any of them was not as it was written."""

    def __init__(
        self,
        cache: Cache,
        reader: SampleReader,
        tokenizer: PreTrainedTokenizerBase | None,
        layers: Sequence[int] | None,
        tokens: int,
        colours: Colours,
    ) -> None:
        self.damaged = False
        self._cache, self._reader, self._layers, self._colours = cache, reader, layers, colours
        self._decode: Decode = _ids_as_text if tokenizer is None else decoder(tokenizer)
        self._most_tokens = tokens
        self._width = columns()

    def preface(self, note: str, number: int) -> Iterator[str]:
        """Yield what is to be said before ``number`` samples."""
        if note:
            yield from (self._colours.paint(line, "yellow") for line in entry("note", note, self._width))
        if not number:
            yield "no samples" if self._cache.record.complete else "no samples so far"
        elif not self._colours.shown:
            yield MARKS_NOTE
            yield ""

    def sample(self, sample: int, *, states: bool) -> list[str]:
        """Return the lines of a sample: its title, its text and, if asked for, its states."""
        lines = self._guarded(lambda: self._text(sample))
        return [*lines, *self._guarded(lambda: self._states(sample))] if states else lines

    def _guarded(self, lines: Callable[[], Iterator[str]]) -> list[str]:
        try:
            return list(lines())
        except (DamagedStoreError, OSError) as error:
            self.damaged = True
            return [self._colours.paint(line, "red") for line in entry("damaged", str(error), self._width)]

    def _text(self, sample: int) -> Iterator[str]:
        tokens = self._reader.tokens(sample)
        names, status = self._cache.sources, self._cache.status
        part = ""
        if names and self._cache.record.phase != "tokens":
            part = f" of {names[int(self._cache.source[sample])]}"
        marked = ", NOT FINITE" if self._cache.record.complete and status[sample] != 0 else ""
        count, supervised = len(tokens.input_ids), int(tokens.loss_mask.sum())
        yield self._colours.paint(f"sample {sample}{part}: {count:,} tokens, {supervised:,} supervised{marked}", "bold")
        shown = min(count, self._most_tokens or count)
        text = masked_text(tokens.input_ids[:shown], tokens.loss_mask[:shown], self._decode, self._colours)
        yield text if shown == count else f"{text} ... and {count - shown:,} tokens more"

    def _states(self, sample: int) -> Iterator[str]:
        if not self._reader.has_states(sample):
            yield "its states are not there yet"
            return
        measured = self._reader.norms(sample, self._layers)
        yield _TITLES
        for norms in measured:
            yield _row(norms)


def _row(norms: StateNorms) -> str:
    name = "last" if norms.layer_id is None else str(norms.layer_id)
    middle = f"{norms.mean_norm:>12.4g}{norms.least_norm:>11.4g}{norms.most_norm:>11.4g}"
    return f"{name:>6}{middle}{norms.least:>12.4g}{norms.most:>11.4g}{norms.nonfinite:>12,}"


def _ids_as_text(ids: Sequence[int]) -> str:
    return f"{' '.join(map(str, ids))} "
