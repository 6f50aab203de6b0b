"""Which spans of a corpus are its samples: documents, or windows over them shuffled and joined."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.megatron.pair import IndexedPair
from dspark_store.sources.megatron.windows import Rule, WindowSettings, cached_indices, split_units
from dspark_store.sources.row_order import select_rows
from dspark_store.sources.source import SourceError

type Mode = Literal["document", "window"]
type OverLong = Literal["truncate", "drop", "split"]
type Outcome = Literal["whole", "truncated", "split", "dropped", "empty"]
type Span = tuple[int, int]  # positions in the stream of the pair, the second one exclusive

DEFAULT_SEED = 1234  # Megatron-LM's own
_IN_EVERY_MODE = ("mode", "skip_images", "loss_mask")


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """How a pair becomes samples: one flat set of values, as a configuration gives them.

    Attributes:
        mode: "document": one document per record. "window": windows of the shuffled and joined corpus.
        skip_images: leave the image sequences of a multimodal pair out, instead of refusing the pair.
        loss_mask: a second pair of the same lengths, whose values (0 or 1) are the loss mask; None: all ones.
        over_long: documents longer than the sequence length: "truncate", "drop" or "split".
        window: S; None: as many tokens as fit into a sample.
        seed: of the shuffles; None: the shuffle seed of the job, or else 1234.
        num_samples: windows asked for. There are as many epochs as that takes, and all their windows are read by the
            rule "megatron"; None: those of one epoch.
        rule: "megatron" or "hyper_parallel"; see `WindowSettings`.
        keep_partial: keep the last window of the corpus where it is shorter than the others.
        extra_token: build the indices so that each window has a token after it.
        carry_next_token: a sample is the window and the token after it, so that its last position has a next token.
        eod_token_id: do not supervise the token after this one (Megatron-LM's `eod_mask_loss`); None: supervise all.
        parts: weights for train, valid and test, such as "990,9,1"; None: all is read.
        part: which of them.
        cache: keep the indices on disk.
        cache_dir: where; None: `<prefix>.windows`, beside the pair.

    """

    mode: Mode = "document"
    skip_images: bool = False
    loss_mask: str | PathLike[str] | None = None
    over_long: OverLong = "truncate"
    window: int | None = None
    seed: int | None = None
    num_samples: int | None = None
    rule: Rule = "megatron"
    keep_partial: bool = False
    extra_token: bool = True
    carry_next_token: bool = True
    eod_token_id: int | None = None
    parts: str | None = None
    part: str = "train"
    cache: bool = True
    cache_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the mode, and that no option of the other mode is set; SourceError names the option."""
        for name, kind in (("mode", Mode), ("over_long", OverLong)):
            known, value = get_args(kind.__value__), getattr(self, name)
            if value not in known:
                raise SourceError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        for field in fields(self):
            of_mode = "document" if field.name == "over_long" else "window"
            value = getattr(self, field.name)
            if field.name not in _IN_EVERY_MODE and of_mode != self.mode and value != field.default:
                raise SourceError(
                    f"{field.name} is {value!r}: an option of the mode {of_mode!r}, but it is {self.mode!r}"
                )

    def window_settings(self, seq_length: int, shuffle_seed: int | None) -> WindowSettings:
        """Return what decides the indices.

        Raises:
            SourceError: a window does not fit into `seq_length` tokens, or a value cannot be.

        """
        carried = int(self.carries)
        window = self.window if self.window is not None else seq_length - carried
        if window + carried > seq_length:
            raise SourceError(
                f"a window of {window} tokens{' and the token after it' if carried else ''} "
                f"needs a sequence length of {window + carried}, and that is {seq_length}; raise it"
                + (", or set carry_next_token to false" if carried else " or make the window smaller")
            )
        seed = next(seed for seed in (self.seed, shuffle_seed, DEFAULT_SEED) if seed is not None)
        return WindowSettings(window, seed, self.num_samples, self.rule, self.keep_partial, self.extra_token)

    @property
    def carries(self) -> bool:
        """Whether a sample ends with the token after its window."""
        return self.extra_token and self.carry_next_token


class Plan:
    """The samples of a source, numbered in the order in which they are read, and the records that they are of.

    A record gives one sample, or several where it is longer than a sample may be; one without tokens gives none.
    Everything follows from lengths; no token is read.

    Attributes:
        lengths: int64, shape (records,): the tokens that each record gives, over all its samples.
        num_samples: all of them.

    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        longest: int,
        pieces: Callable[[int], Iterator[Span]],
        name: Callable[[int], str],
        tokens: NDArray[np.int64] | None = None,
    ) -> None:
        """Number the samples.

        Args:
            lengths: int64, shape (records,): the tokens that each record gives, from its beginning.
            longest: the most tokens of a sample.
            pieces: gives the spans of a record whose tokens, joined, it is.
            name: gives what a record is called in messages; numbers count from 0.
            tokens: int64, shape (records,): those that each record has; None: what it gives.

        """
        self.lengths, self._longest, self._pieces, self.name = lengths, longest, pieces, name
        self._tokens = lengths if tokens is None else tokens
        self._samples_until = np.cumsum(-(-lengths // longest))  # by the end of each record
        self.num_samples = int(self._samples_until[-1])

    def spans(self, sample: int) -> list[Span]:
        """Return the spans whose tokens, joined, are a sample."""
        record = self.records_before(sample)
        first = (sample - self._samples_before(record)) * self._longest
        last = min(first + self._longest, int(self.lengths[record]))
        spans = []
        for start, stop in self._pieces(record):
            if first < stop - start and last > 0:
                spans.append((start + max(first, 0), min(stop, start + last)))
            first, last = first - (stop - start), last - (stop - start)
        return spans

    def records_before(self, sample: int) -> int:
        """Return how many records are done before a sample; those without tokens are with the one before them."""
        return int(np.searchsorted(self._samples_until, sample, side="right"))

    def first_sample(self, record: int) -> int | None:
        """Return the first sample of a record, or None if it gives none."""
        return self._samples_before(record) if self.lengths[record] else None

    def outcome(self, record: int) -> Outcome:
        """Return what becomes of a record."""
        tokens, given = self._tokens[record], self.lengths[record]
        if not tokens:
            return "empty"
        if tokens > given:
            return "truncated" if given else "dropped"
        return "split" if given > self._longest else "whole"

    def _samples_before(self, record: int) -> int:
        return int(self._samples_until[record - 1]) if record else 0


def plan_documents(starts: NDArray[np.int64], rows: NDArray[np.int64], seq_length: int, over_long: OverLong) -> Plan:
    """Return the plan whose records are documents.

    Args:
        starts: int64, shape (documents + 1,): position in the stream at which each document starts.
        rows: int64, shape (records,): the documents to read, in order.
        seq_length: the longest sample.
        over_long: what becomes of longer documents. "truncate": their first `seq_length` tokens. "drop": nothing.
            "split": consecutive samples of `seq_length` tokens, the last one shorter.

    Raises:
        SourceError: no document gives a sample.

    """
    tokens = kept = starts[rows + 1] - starts[rows]
    if over_long == "truncate":
        kept = np.minimum(tokens, seq_length)
    elif over_long == "drop":
        kept = np.where(tokens > seq_length, 0, tokens)
    if not kept.any():
        raise SourceError(
            f"none of the {len(rows)} documents gives a sample: all are empty"
            + (f" or longer than {seq_length} tokens, which drops them" if over_long == "drop" else "")
        )

    def pieces(record: int) -> Iterator[Span]:
        document = int(rows[record])
        yield int(starts[document]), int(starts[document + 1])

    return Plan(kept, seq_length, pieces, lambda record: f"document {rows[record]}", tokens)


def plan_windows(
    pair: IndexedPair,
    options: MegatronOptions,
    settings: WindowSettings,
    split: str | None,
    max_samples: int | None,
) -> Plan:
    """Return the windows of a pair: of its sequences, each a unit, or by hyper-parallel's rule of its documents.

    `split` takes a slice of them, in the order in which they are served.

    Raises:
        SourceError: an option cannot be used, or there is no window.

    """
    starts = pair.starts if settings.rule == "megatron" else pair.document_starts()
    if options.parts is not None:
        first, last = split_units(len(starts) - 1, options.parts, options.part)
        starts = starts[first : last + 1]
    units = np.diff(starts)
    kept_in = options.cache_dir or pair.prefix.with_name(f"{pair.prefix.name}.windows")
    indices = cached_indices(units, settings, Path(kept_in) if options.cache else None)
    if not len(indices.shuffle):
        raise SourceError(
            f"{int(units.sum())} tokens are less than a window of {settings.window} and the token after it; make the "
            "window smaller, or set num_samples, for which the corpus is repeated"
        )
    rows = select_rows(len(indices.shuffle), split=split, shuffle_seed=None, max_samples=max_samples)

    def pieces(record: int) -> Iterator[Span]:
        for unit, start, stop in indices.pieces(rows[record], units, extra=int(settings.extra_token)):
            yield int(starts[unit]) + start, int(starts[unit]) + stop

    longest = settings.window + int(options.carries)
    lengths = np.full(len(rows), longest, np.int64)
    if settings.keep_partial:  # the last window of the corpus may be shorter than the others
        for record in np.flatnonzero(indices.shuffle[rows[0] : rows[-1] + 1] == len(indices.sample) - 2).tolist():
            lengths[record] = min(longest, sum(stop - start for start, stop in pieces(record)))
    return Plan(lengths, longest, pieces, lambda record: f"window {rows[record]}")
