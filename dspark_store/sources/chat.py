"""Rows of conversations, or of tokens, as a source of samples."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, cast

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.encode import Encoded, Encoder, EncoderSettings, encode_here, encode_in_workers
from dspark_store.sources.files import DataPath, are_json, open_rows
from dspark_store.sources.identity import CHAT_RULE
from dspark_store.sources.limits import DEFAULT_LIMITS, RenderLimits
from dspark_store.sources.options import DEFAULT_OPTIONS, ChatOptions, RowOptions, options_identity, options_of
from dspark_store.sources.registry import OwnOrder, SourceContext
from dspark_store.sources.row_order import select_automodels_rows, select_rows, split_name
from dspark_store.sources.rows import RowData, Rows
from dspark_store.sources.source import Sample, Source, SourceError, SourceReport
from dspark_store.sources.template import todays_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_TASK = 64
_PARTS = 2**24  # pieces that one row may be divided into

logger = logging.getLogger(__name__)


class ChatSource(Source):
    """The chat-template tokens of conversations, and a mask of what the assistant said.

    The data is read through once here, for its content hash and the place of every row, and then by row, so that
    memory does not grow with it. Rows are checked when they are read; `report` tells what became of them.
    """

    def __init__(
        self,
        path: DataPath | Sequence[DataPath],
        tokenizer: "PreTrainedTokenizerBase | None",
        options: ChatOptions = DEFAULT_OPTIONS,
        *,
        seq_length: int,
        split: str | None = None,
        shuffle_seed: int | None = None,
        max_samples: int | None = None,
        num_workers: int = 0,
        subset: str | None = None,
        vocab_size: int | None = None,
        limits: RenderLimits = DEFAULT_LIMITS,
        today: str | None = None,
        recorded: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Open the data and check the options.

        Args:
            path: files, globs, directories or datasets (see `files.open_rows`) whose rows are conversations, or
                tokens (`input_ids`, see `rows.read_tokens`).
            tokenizer: with a chat template (see `apply_chat_template_option`); None if all rows are tokens.
            options: how rows become samples.
            seq_length: the most tokens of a sample.
            split: None or `name[a:b]`, a slice of the rows after the shuffle.
            shuffle_seed: None for the order of the data, else the seed of the permutation of `row_order.select_rows`.
            max_samples: read at most this many rows, after shuffle and split.
            num_workers: processes that tokenise; 0 for this one. The samples are the same.
            subset: the configuration of a dataset on the hub.
            vocab_size: ids of rows that are tokens already must be below it.
            limits: what rendering one row may take.
            today: YYYY-MM-DD, the date for templates that ask the clock where neither the options nor `recorded` have
                one; None for the system's.
            recorded: the identity of this source in the store that is gone on with.

        Raises:
            FileNotFoundError: there is no such file.
            SourceError: there are no rows, or an option or the chat template cannot be used.

        """
        if num_workers < 0:
            raise SourceError(f"num_workers is {num_workers}; expected 0 or more")
        options.check_options()
        if seq_length < 1:
            raise SourceError(f"seq_length is {seq_length}; expected at least 1")
        if options.min_supervised > seq_length:
            raise SourceError(
                f"min_supervised is {options.min_supervised}; expected 0 to seq_length, which is {seq_length}"
            )
        if options.truncation_side is None:
            options = replace(options, truncation_side="right" if tokenizer is None else tokenizer.truncation_side)
        self._settings = EncoderSettings(tokenizer, seq_length, options, vocab_size, limits)
        self._encoder = Encoder(self._settings)
        self._data = open_rows(
            path,
            split=split_name(split),
            subset=subset,
            columns=options.columns,
            text_column=options.text_column,
        )
        self._rows = _selected(self._data, options.order, split, shuffle_seed, max_samples)
        self._num_workers = num_workers
        self._refused_before = 0
        self._parts = _PARTS if options.over_long == "split" else 1
        self._report = SourceReport()
        for column, count in self._data.unread.items():
            self._note(f"column {column!r} is not read", count, self._data.where(0).rpartition(", ")[0])
        self._options = options = self._dated(options, today, recorded)
        self._identity: dict[str, JsonValue] = {
            **({"type": "tokens"} if tokenizer is None else {"type": "chat", "rule": CHAT_RULE}),
            "content_sha256": self._data.content_sha256,
            **({"beside_sha256": self._data.beside_sha256} if tokenizer and self._data.beside_sha256 else {}),
            "split": split,
            "shuffle_seed": shuffle_seed,
            "max_samples": max_samples,
            **options_identity(options),
        }

    @property
    def template_date(self) -> str | None:
        """The date that the template is told, YYYY-MM-DD; None where no row makes it ask the clock."""
        return cast("str | None", self._settings.options.template_date)

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples beside the tokenizer, its template and `seq_length`."""
        return dict(self._identity)

    def __len__(self) -> int:
        """Return the number of rows after split, shuffle and `max_samples`."""
        return len(self._rows)

    def report(self) -> SourceReport:
        """Return what became of the rows read so far, by all calls of `read` together."""
        return self._report

    def where(self, record: int) -> str:
        """Return the file and the place in it of a record, for messages."""
        return self._data.where(self._rows[record])

    def read(self, cursor: int = 0) -> Iterator[Sample]:
        """Yield the samples from the cursor on.

        Raises:
            ValueError: there is no such cursor.
            SourceError: a row cannot be used and may not be skipped (the message names the file and the line), or
                the data was changed.

        """
        if not 0 <= cursor <= len(self) * self._parts:
            raise ValueError(f"cursor is {cursor}; expected 0 to {len(self) * self._parts}")
        return self._read(*divmod(cursor, self._parts))

    def resume(self, cursor: int, samples: int) -> None:
        """Count the rows before a cursor that gave no sample as refused, given how many samples there were."""
        if self._options.over_long == "truncate" and self._options.min_supervised == 0:  # each other row gives one
            self._refused_before = max(0, self.record_of(cursor) - samples)

    def record_of(self, cursor: int) -> int:
        """Return how many rows are passed at a cursor."""
        return cursor // self._parts

    def sample(self, record: int) -> Sample:
        """Return the (first) sample of one row; SourceError if it cannot be used or gives none."""
        if not 0 <= record < len(self):
            raise IndexError(f"record is {record}; expected 0 to {len(self) - 1}")
        with closing(self._data):
            (encoded,) = self._encoder.encode(self._data.take([self._rows[record]]))
        if encoded.error is not None:
            raise SourceError(f"{self.where(record)}: {encoded.error}")
        if not encoded.pieces:
            reason = "longer than seq_length" if encoded.dropped else "fewer supervised tokens than min_supervised"
            raise SourceError(f"{self.where(record)}: the row is left out ({reason})")
        for note in encoded.notes:
            self._note(note, 1, self.where(record))
        return next(self._samples(record, encoded, 0))

    def _dated(self, options: ChatOptions, today: str | None, recorded: Mapping[str, JsonValue] | None) -> ChatOptions:
        """Return the options with the date that the template is told, and make the encoder that tells it.

        It is None where no row makes the template ask. A store that is gone on with has decided that.
        """
        given = None if options.template_date is None else str(options.template_date)
        if given is None and recorded is not None:
            date = cast("str | None", recorded.get("template_date"))
        else:
            date = given or today or todays_date()
            date = date if self._asks_clock(replace(options, template_date=date)) else None
        if given is not None and date is None:
            logger.warning("template_date %s changes nothing: no row makes the chat template ask the clock", given)
        options = replace(options, template_date=date)
        self._settings = replace(self._settings, options=options)
        self._encoder = Encoder(self._settings)
        return options

    def _asks_clock(self, options: ChatOptions) -> bool:
        """Tell whether any row makes the template ask the clock; rows are rendered until one does."""
        if not self._encoder.may_ask_clock:
            return False
        asking = Encoder(replace(self._settings, options=options))
        with closing(self._data):
            return any(map(asking.asks_clock, chain.from_iterable(self._tasks(0))))

    def _read(self, first: int, part: int) -> Iterator[Sample]:
        allowed = self._options.max_refused * len(self)
        refused = self._refused_before if first else 0
        with closing(self._data):
            for record, encoded in enumerate(self._encoded(first), first):
                if encoded.error is not None:
                    self._refuse(record, encoded.error, fatal=encoded.fatal)
                    refused += 1
                    if refused > allowed:
                        raise SourceError(
                            f"{self.where(record)}: {encoded.error}; with it {refused:,} rows cannot be used, more "
                            f"than max_refused ({self._options.max_refused:.2%} of {len(self):,} rows)"
                        )
                self._count(record, encoded)
                yield from self._samples(record, encoded, part if record == first else 0)

    def _encoded(self, first: int) -> Iterator[Encoded]:
        tasks = self._tasks(first)
        if self._num_workers:
            return encode_in_workers(self._settings, tasks, self._num_workers)
        return encode_here(self._encoder, tasks)

    def _tasks(self, first: int) -> Iterator[list[RowData]]:
        for start in range(first, len(self), ROWS_PER_TASK):
            yield self._data.take(list(self._rows[start : start + ROWS_PER_TASK]))

    def _samples(self, record: int, encoded: Encoded, part: int) -> Iterator[Sample]:
        pieces = encoded.pieces
        for index in range(part, len(pieces)):
            last = index + 1 == len(pieces)
            cursor = (record + 1) * self._parts if last else record * self._parts + index + 1
            yield Sample(*pieces[index], cursor)

    def _refuse(self, record: int, error: str, *, fatal: bool) -> None:
        where = self.where(record)
        if fatal or self._options.on_bad_row == "error":
            raise SourceError(f"{where}: {error}")
        self._report.refuse(where, error)

    def _note(self, note: str, rows: int, where: str) -> None:
        """Count rows of which something was left aside, and say so the first time."""
        if rows and self._report.note(note, rows):
            logger.warning("%s: %s; told once, and counted in dspark-store tokens --report", where, note)

    def _count(self, record: int, encoded: Encoded) -> None:
        report = self._report
        for note in encoded.notes:
            self._note(note, 1, self.where(record))
        for warning in encoded.warnings:
            logger.warning("%s: %s", self.where(record), warning)
        report.add_samples(mask for _, mask in encoded.pieces)
        report.read += 1
        report.kept += bool(encoded.pieces)
        report.truncated += encoded.truncated and bool(encoded.pieces)
        report.split += encoded.split
        report.dropped += encoded.dropped
        report.too_few_supervised += encoded.too_few_supervised
        report.replaced += encoded.replaced
        report.empty += encoded.empty


def _selected(
    data: Rows, order: str | None, split: str | None, shuffle_seed: int | None, max_samples: int | None
) -> Sequence[int]:
    """Return the rows to read, in order."""
    if order is None:
        return select_rows(len(data), split=split, shuffle_seed=shuffle_seed, max_samples=max_samples)
    is_json = are_json(data)
    if is_json and split is not None and "[" in split:
        logger.warning("split %s takes nothing away: NeMo Automodel reads all rows of JSON files", split)
    return select_automodels_rows(
        len(data), is_json=is_json, split=split, shuffle_seed=shuffle_seed, max_samples=max_samples
    )


def build_chat(
    context: SourceContext,
    *,
    path: DataPath | Sequence[DataPath],
    subset: str | None = None,
    **options: Annotated[object, ChatOptions, OwnOrder],
) -> ChatSource:
    """Build a source of conversations; what its specification leaves out is as the job says. See `ChatSource`."""
    job = context.taking(options, OwnOrder)
    return _build(job, path, subset, context.tokenizer("chat"), options_of(context, options))


def build_tokens(
    context: SourceContext,
    *,
    path: DataPath | Sequence[DataPath],
    subset: str | None = None,
    **options: Annotated[object, RowOptions, OwnOrder],
) -> ChatSource:
    """Build a source of rows that are tokens already, which needs no tokenizer. See `ChatSource`."""
    job = context.taking(options, OwnOrder)
    given = options_of(context, options)
    chosen = ChatOptions(**{option.name: getattr(given, option.name) for option in fields(RowOptions)})
    return _build(job, path, subset, None, chosen)


def _build(
    context: SourceContext,
    path: DataPath | Sequence[DataPath],
    subset: str | None,
    tokenizer: "PreTrainedTokenizerBase | None",
    options: ChatOptions,
) -> ChatSource:
    return ChatSource(
        path,
        tokenizer,
        options,
        seq_length=context.seq_length,
        split=context.split,
        shuffle_seed=context.shuffle_seed,
        max_samples=context.max_samples,
        num_workers=context.num_workers,
        subset=subset,
        vocab_size=context.vocab_size,
        today=context.today,
        recorded=context.recorded,
    )
