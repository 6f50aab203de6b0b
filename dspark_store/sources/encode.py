"""From the data of rows to their samples."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.limits import DEFAULT_LIMITS, ProcessorTimeError, RenderLimits, run_limited
from dspark_store.sources.masks import Rendered, loss_mask, render_with_spans
from dspark_store.sources.messages import Conversation, content_of, read_conversation
from dspark_store.sources.options import ChatOptions, RowOptions
from dspark_store.sources.rendering import Renderer, Tokens
from dspark_store.sources.rows import RowData, parse_row, read_tokens, renamed, unread_keys
from dspark_store.sources.source import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Piece = tuple[NDArray[np.int32], NDArray[np.uint8]]  # ids and mask, both (length,)


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What an encoder is made from. It travels to worker processes, so it holds nothing that cannot be pickled.

    Attributes:
        tokenizer: with a chat template; None if all rows are tokens already.
        seq_length: the most tokens of a sample.
        options: how rows become samples; the side where they are cut is given.
        vocab_size: the ids of rows that are tokens already must be below it, if given.
        limits: what rendering one row may take.

    """

    tokenizer: "PreTrainedTokenizerBase | None"
    seq_length: int
    options: ChatOptions
    vocab_size: int | None = None
    limits: RenderLimits = DEFAULT_LIMITS


@dataclass(frozen=True, slots=True)
class Encoded:
    """What became of one row: its pieces, or why it cannot be used. Messages do not name the place.

    Attributes:
        pieces: what is kept of it.
        truncated: it was cut.
        split: it was divided.
        dropped: it was left out for its length.
        too_few_supervised: how many pieces were left out since too little of them is supervised.
        error: what is wrong with the row.
        fatal: and that it ends the reading, also where rows that cannot be used are skipped.
        empty: the row renders to no tokens, which is wrong too.
        replaced: lone surrogates were replaced.
        warnings: what was odd about it.
        notes: what of it was left aside, which is told once for all rows.

    """

    pieces: list[Piece] = field(default_factory=list)
    truncated: bool = False
    split: bool = False
    dropped: bool = False
    too_few_supervised: int = 0
    error: str | None = None
    fatal: bool = False
    empty: bool = False
    replaced: bool = False
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Encoder:
    """Turns rows into samples of at most `seq_length` tokens, many in one call of the tokenizer."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Look at the tokenizer's template; SourceError if it cannot be used."""
        self._settings = settings
        self._text_column = settings.options.text_column
        self._renderer: Renderer | None = None
        if settings.tokenizer is not None and self._text_column is None:
            date = None if settings.options.template_date is None else str(settings.options.template_date)
            kwargs = settings.options.chat_template_kwargs
            self._renderer = Renderer(settings.tokenizer, kwargs, date=date, limits=settings.limits)

    def encode(self, rows: Sequence[RowData]) -> list[Encoded]:
        """Return what becomes of each row, up to one that is fatal."""
        read: list[_Read | Encoded] = []
        for data in rows:
            row = self._read(data)
            read.append(row)
            if isinstance(row, Encoded) and row.fatal:
                break
        contents = (row.content for row in read if isinstance(row, _Read))
        tokens = iter(self._tokenise([content.text for content in contents if isinstance(content, Rendered)]))
        return [row if isinstance(row, Encoded) else self._encoded(row, tokens) for row in read]

    @property
    def may_ask_clock(self) -> bool:
        """Whether some row can make the template ask the clock."""
        return self._renderer is not None and self._renderer.may_ask_clock

    def asks_clock(self, data: RowData) -> bool:
        """Tell whether the template asks the clock for a row; a date must be given."""
        renderer = self._renderer
        if renderer is None:
            return False
        try:
            row, _ = self._parsed(data)
            if row.get("input_ids") is not None:
                return False
            conversation = read_conversation(row)
            return run_limited(lambda: renderer.asks_clock(conversation), renderer.limits.seconds)
        except (SourceError, ProcessorTimeError):  # told when the row is encoded
            return False

    def _tokenise(self, texts: list[str]) -> list[Tokens]:
        """Tokenise texts: plain ones with the special tokens that the tokenizer adds by itself, others with none."""
        if self._renderer is not None:
            return self._renderer.tokenise(texts)
        if not texts or self._settings.tokenizer is None:
            return []
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        tokenised: Any = self._settings.tokenizer(texts, **options)
        return [Tokens(np.array(ids, dtype=np.int32), None) for ids in tokenised["input_ids"]]

    def _parsed(self, data: RowData) -> tuple[dict[str, JsonValue], bool]:
        """Return a row under our names, and whether lone surrogates of it were replaced."""
        row, replaced = parse_row(data)
        return row if self._text_column is not None else renamed(row, self._settings.options.columns or {}), replaced

    def _read(self, data: RowData) -> "_Read | Encoded":
        try:
            row, replaced = self._parsed(data)
            if replaced and self._settings.options.on_bad_row == "error":
                raise SourceError("the row holds half of a surrogate pair, which is no Unicode text")
            notes = [f"key {key!r} is not read" for key in unread_keys(row, self._text_column)]
            if self._text_column is not None:
                return _Read(Rendered(_text_of(row, self._text_column), [], [], []), replaced, notes)
            if row.get("input_ids") is not None:
                return _Read(read_tokens(row, self._settings.vocab_size), replaced, notes)
            renderer = self._renderer
            if renderer is None:
                raise SourceError(
                    f"the row has no input_ids, and this source has no tokenizer; its keys are {sorted(row)}; "
                    "conversations are a source of type chat"
                )
            conversation = read_conversation(row)
            seconds = renderer.limits.seconds
            rendered = run_limited(lambda: render_with_spans(renderer, conversation, self._settings.options), seconds)
            return _Read(rendered, replaced, notes + _left_out(conversation, rendered.text))
        except ProcessorTimeError as error:
            return Encoded(error=f"the chat template takes {error} for the row; does it end?", fatal=True)
        except SourceError as error:
            return Encoded(error=str(error))

    def _encoded(self, row: "_Read", tokens: Iterator[Tokens]) -> Encoded:
        warnings: list[str] = []
        if not isinstance(row.content, Rendered):
            ids, mask = row.content
        elif self._renderer is None:
            ids = next(tokens).ids
            mask = np.ones(len(ids), dtype=np.uint8)
        else:
            its, warnings = next(tokens), row.content.warnings
            ids, mask = its.ids, loss_mask(self._renderer, row.content, its)
        if not len(ids):
            return Encoded(error="the row has no tokens (does the chat template render anything?)", empty=True)
        made = cut(ids, mask, self._settings.seq_length, self._settings.options)
        return replace(made, replaced=row.replaced, warnings=warnings, notes=row.notes)


def cut(ids: NDArray[np.int32], mask: NDArray[np.uint8], length: int, options: RowOptions) -> Encoded:
    """Return the pieces of a row's tokens, each of at most `length`."""
    too_long = len(ids) > length
    if too_long and options.over_long == "drop":
        return Encoded(dropped=True)
    pieces = [(ids, mask)]
    if too_long:
        cuts = [slice(-length, None) if options.truncation_side == "left" else slice(length)]
        if options.over_long == "split":
            cuts = [slice(start, start + length) for start in range(0, len(ids), length)]
        pieces = [(ids[kept].copy(), mask[kept].copy()) for kept in cuts]
    enough = [piece for piece in pieces if int(piece[1].sum()) >= options.min_supervised]
    return Encoded(
        enough,
        truncated=too_long and options.over_long == "truncate",
        split=len(pieces) > 1,
        too_few_supervised=len(pieces) - len(enough),
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """A row before its text is tokenised: its text, or its tokens."""

    content: Rendered | Piece
    replaced: bool
    notes: list[str]


def _text_of(row: Mapping[str, JsonValue], column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        raise SourceError(f"{column}, which text_column names, is {text!r:.60}; expected text; keys: {sorted(row)}")
    return text


def _left_out(conversation: Conversation, text: str) -> list[str]:
    """Return the roles above the user's of whose messages the text has nothing: a template may not know them."""
    missing = {
        str(message["role"])
        for message in conversation.messages
        if message["role"] in ("system", "developer") and content_of(message).strip() not in text
    }
    return [f"the chat template leaves out messages of the role {role}" for role in sorted(missing)]


TASKS_PER_WORKER = 2


def encode_here(encoder: Encoder, tasks: Iterable[list[RowData]]) -> Iterator[Encoded]:
    """Yield what becomes of each row of the tasks, in order."""
    for task in tasks:
        yield from encoder.encode(task)


def encode_in_workers(settings: EncoderSettings, tasks: Iterable[list[RowData]], num_workers: int) -> Iterator[Encoded]:
    """Yield what becomes of each row of the tasks, in order, encoded by `num_workers` processes.

    At most `TASKS_PER_WORKER` tasks a worker are read ahead. The processes are spawned, never forked, and each
    tokenises in one thread.

    Raises:
        RuntimeError: a process died.

    """
    executor = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    )
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        for task in tasks:
            pending.append(executor.submit(_encode_task, task))
            if len(pending) >= num_workers * TASKS_PER_WORKER:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of the {num_workers} tokenising processes died (killed, or out of memory?); "
            "num_workers = 0 tokenises in this process"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_encoder_here: list[Encoder] = []  # the one encoder of a worker process, put there by its initializer


def _start_worker(settings: EncoderSettings) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _encoder_here.append(Encoder(settings))


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: its queues alone would keep it waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_task(rows: list[RowData]) -> list[Encoded]:
    (encoder,) = _encoder_here
    return encoder.encode(rows)
