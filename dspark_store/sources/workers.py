"""Encoding in this process or in several, in order and as a stream."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from dspark_store.sources.encode import Encoded, Encoder, EncoderSettings
from dspark_store.sources.rows import RowData

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
