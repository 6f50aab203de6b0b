"""From the text of one row to its sample, here or in worker processes."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING

from dspark_store.sources.jsonl import parse_row
from dspark_store.sources.masks import tokens_and_mask
from dspark_store.sources.messages import read_conversation
from dspark_store.sources.rendering import Renderer
from dspark_store.sources.source import Sample, SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_TASK = 32
TASKS_PER_WORKER = 2

type RawRow = tuple[str, bytes]  # its place, for messages, and its JSON text


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What an encoder is made from. It travels to worker processes, so it holds nothing that cannot be pickled."""

    tokenizer: "PreTrainedTokenizerBase"
    seq_length: int
    truncation_side: str
    mask_reasoning_content: bool


class Encoder:
    """Turns rows into samples of at most `seq_length` tokens."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Look at the tokenizer's template; SourceError if it cannot be used."""
        self._settings = settings
        self._renderer = Renderer(settings.tokenizer)

    def encode(self, row: RawRow) -> Sample:
        """Return the sample of one row; SourceError, with the row's place, if the row cannot be used."""
        where, text = row
        try:
            ids, mask = tokens_and_mask(
                self._renderer,
                read_conversation(parse_row(text)),
                mask_reasoning_content=self._settings.mask_reasoning_content,
                where=where,
            )
            if not len(ids):
                raise SourceError("the chat template renders the conversation to no tokens")
        except SourceError as error:
            raise SourceError(f"{where}: {error}") from error
        length = self._settings.seq_length
        kept = slice(-length, None) if self._settings.truncation_side == "left" else slice(length)
        return Sample(ids[kept].copy(), mask[kept].copy())


def encode_in_workers(settings: EncoderSettings, rows: Iterable[RawRow], num_workers: int) -> Iterator[Sample]:
    """Yield the samples of the rows in order, encoded by `num_workers` processes.

    At most `ROWS_PER_TASK * TASKS_PER_WORKER` rows a worker are read ahead. The processes are spawned, never forked.

    Raises:
        SourceError: a row cannot be used; raised in its place, after the samples of the rows before it.
        RuntimeError: a process died.

    """
    executor = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    )
    pending: deque[Future[_Encoded]] = deque()
    try:
        for task in batched(rows, ROWS_PER_TASK):
            pending.append(executor.submit(_encode_task, task))
            if len(pending) >= num_workers * TASKS_PER_WORKER:
                yield from _samples_of(pending.popleft().result())
        while pending:
            yield from _samples_of(pending.popleft().result())
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of the {num_workers} tokenising processes died (killed, or out of memory?); "
            "num_workers = 0 tokenises in this process"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The samples of a task up to the first row that cannot be used, and what is wrong with that one."""

    samples: list[Sample]
    error: str | None


_encoder_here: list[Encoder] = []  # the one encoder of a worker process, put there by its initializer


def _start_worker(settings: EncoderSettings) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder_here.append(Encoder(settings))


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: its queues alone would keep it waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_task(rows: tuple[RawRow, ...]) -> _Encoded:
    (encoder,) = _encoder_here
    samples: list[Sample] = []
    for row in rows:
        try:
            samples.append(encoder.encode(row))
        except SourceError as error:
            return _Encoded(samples, str(error))
    return _Encoded(samples, None)


def _samples_of(encoded: _Encoded) -> Iterator[Sample]:
    yield from encoded.samples
    if encoded.error is not None:
        raise SourceError(encoded.error)
