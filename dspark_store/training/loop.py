"""A training from start to finish: epochs of batches, steps, validations and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dspark_store.format.metadata import has_store
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.undo import full_disk_told, new_folders_undone
from dspark_store.progress import Progress, start_progress
from dspark_store.text import say, size_text
from dspark_store.training.checkpoint import (
    CHECKPOINTS,
    checkpoints,
    found_checkpoint,
    load_checkpoint,
    read_state,
    readable,
    save_checkpoint,
    set_aside,
)
from dspark_store.training.data import TrainingData, build_draft, open_data
from dspark_store.training.journal import METRICS, Journal, read_metrics
from dspark_store.training.learner import Judged, Learner, Schedule, nothing_judged, warmup_steps
from dspark_store.training.ranks import Ranks, joined_ranks
from dspark_store.training.settings import TrainConfig
from dspark_store.training.state import Origin, TrainingState, refuse_another
from dspark_store.writers.lock import LostLockError, StoreLock

_log = logging.getLogger(__name__)
_EXEMPT = {
    *("store", "live", "output_dir", "resume", "resume_from", "keep_checkpoints", "checkpoint_every", "validate_every"),
    *("device", "threads", "prefetch_bytes", "log_every", "log_level", "tensorboard"),
}
"""Settings that do not decide the course of a training."""


def train(config: TrainConfig) -> int:
    """Do a training, alone or as one of torchrun's ranks; return the exit code 0.

    ValueError, OSError or ImportError for what a user can get wrong, before anything is written;
    DamagedCheckpointError for a checkpoint that is not what was written; LostLockError when another job has taken the
    directory; FloatingPointError when a gradient is not finite.
    """
    config.check()
    output = Path(config.output_dir)
    check_output(output)
    with (
        full_disk_told(output, "checkpoints that are there stay: free some, go on with --resume"),
        joined_ranks(config.resolved_device) as ranks,
        held(output, ranks) as hold,
    ):
        Training(config, ranks, found_checkpoint(config, ranks), hold).run()
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """A training's hold of its directory, by the lock of rank 0; ``heard`` gets a line when that is lost."""

    lock: StoreLock | None = None
    heard: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Raise LostLockError if the directory is another job's by now; to be called before every write."""
        if self.lock is not None:
            self.lock.check()

    def check_heard(self) -> None:
        """Raise LostLockError if the heartbeat has found that; asks no disk."""
        if self.heard:
            raise LostLockError(self.heard[0])


@contextmanager
def held(output: Path, ranks: Ranks) -> Iterator[Hold]:
    """Hold a directory for one training; all ranks call it together, rank 0 takes the lock.

    BlockingIOError there, ToldError on the others, when another training has it.
    """
    heard: list[str] = []
    with ExitStack() as stack:
        with ranks.together():
            lock = None
            if ranks.leads:
                stack.enter_context(new_folders_undone(output))
                lock = StoreLock(LocalStorage(output), on_lost=heard.append, remedy="wait for it, or end it")
                stack.enter_context(lock)
        yield Hold(lock, heard)


def check_output(output: Path) -> None:
    """Raise ValueError for a place that a training must not write to: a file, or a store, whose files are all known."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output-dir {output} is a file: give a directory")
    for place in (output.resolve(), *output.resolve().parents):
        if has_store(LocalStorage(place)):
            raise ValueError(f"--output-dir {output} is inside the store {place}: choose a directory outside of it")


class Training:
    """One training on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        checkpoint: Path | None,
        hold: Hold = Hold(),
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.data: TrainingData = open_data(config, ranks, hold.check)
        torch.manual_seed(config.seed)
        draft = build_draft(config, self.data)
        self.steps_an_epoch = -(-len(self.data.train) // config.accumulate)
        planned = self.steps_an_epoch * config.epochs
        self.total = planned if config.max_steps is None else min(planned, config.max_steps)
        warmup = warmup_steps(config.warmup_ratio, self.total)
        self.learner = Learner(draft, config, Schedule(self.total, warmup, config.min_lr_ratio), ranks)
        self._seconds_waited = self._seconds = 0.0
        self._window: Judged | None = None
        self._origin = Origin.of(self.data.cache)
        if checkpoint is not None:
            self._go_on(checkpoint)
        self._hold = hold
        self._spared: tuple[str, ...] = ()
        with ranks.together():
            self._journal = self._open_journal()

    @property
    def waiting_share(self) -> float:
        """The share of the steps' time that was spent waiting for data."""
        return self._seconds_waited / self._seconds if self._seconds else 0.0

    def run(self) -> None:
        """Train to the end, and tell what came of it. A training that is there already is left as it is."""
        started, learner, before = time.monotonic(), self.learner, self.learner.step
        lines = [f"nothing is left to do: {learner.step} steps are done, of {self.total}"]
        try:
            if learner.step < self.total:
                if learner.step == 0 and self.config.validate_every:  # what the draft is worth before it learns
                    self.validate()
                with start_progress("train", self.total, "steps", learner.step) as progress:
                    while learner.step < self.total:
                        self._epoch(progress)
                figures = self.validate()
                self._checkpoint()
                lines = self._summary(figures, before, time.monotonic() - started)
        finally:
            self.data.train.close()
            if self._journal is not None:
                self._journal.close()
        if self.ranks.leads:
            for line in lines:
                say(line)

    def _epoch(self, progress: Progress) -> None:
        epoch, loader, config = self.data.train.epoch, self.data.train, self.config
        left, pending = len(loader) - self._batches_done(), 0
        began = time.monotonic()
        for batch in self._timed(iter(loader)):
            left, pending = left - 1, pending + 1
            ends = pending == config.accumulate or left == 0
            judged = self.learner.accumulate(batch, epoch, last=ends)
            self._window = judged if self._window is None else self._window + judged
            del batch
            if not ends:
                continue
            self._hold.check_heard()
            norm, rate = self.learner.update(pending)
            pending = 0
            self._seconds += time.monotonic() - began
            if self.learner.step % config.log_every == 0 or self.learner.step == self.total:
                self._log(self._window, {"epoch": epoch, "learning_rate": rate, "gradient_norm": norm}, progress)
                self._window = None
            progress.advance(1)
            self._now_and_then()
            began = time.monotonic()
            if self.learner.step == self.total:
                return

    def _batches_done(self) -> int:
        state = self.data.train.state_dict()
        return int(state["consumed"]) // int(state["global_batch"])

    def _timed(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield batches, noting how long each was waited for."""
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self._seconds_waited += time.monotonic() - began
            if batch is None:
                return
            yield batch
            del batch

    def _log(self, window: Judged, more: dict[str, float], progress: Progress) -> None:
        figures = {**window.figures(self.ranks), **more}
        progress.advance(0, f"loss {figures['loss']:.3f}, tau {figures.get('tau', 1.0):.2f}")
        if self._journal is not None:
            self._journal.write("train", self.learner.step, figures)

    def _now_and_then(self) -> None:
        """Validate and save where it is time for it; the end does both anyway.

        In this order: what a checkpoint is gone on from has all metrics of its step.
        """
        step, config = self.learner.step, self.config
        if step == self.total:
            return
        if config.validate_every and step % config.validate_every == 0:
            self.validate()
        if config.checkpoint_every and step % config.checkpoint_every == 0:
            self._checkpoint()

    def validate(self) -> dict[str, float]:
        """Judge the validation samples; return the figures, none without such samples."""
        if self.data.validation is None:
            return {}
        judged = nothing_judged(self.config, self.ranks.device)
        for batch in self.data.validation:
            if len(batch["sample"]):
                judged = judged + self.learner.validate(batch)
        self.data.validation.set_epoch(0)
        figures = judged.figures(self.ranks)
        if self._journal is not None:
            self._journal.write("validation", self.learner.step, figures)
        return figures

    def _checkpoint(self) -> None:
        state, keep = self._state(), self.config.keep_checkpoints
        with self.ranks.together():
            if self._journal is not None:
                self._journal.flush()
                check = self._hold.check
                save_checkpoint(self._checkpoints, self.learner, state, keep, spared=self._spared, check=check)

    @property
    def _checkpoints(self) -> Path:
        return Path(self.config.output_dir) / CHECKPOINTS

    def _state(self) -> TrainingState:
        """Return where this training stands; all ranks call it together."""
        parts = [] if self._window is None else self.ranks.gathered(self._window.vector())
        window = tuple(tuple(part.tolist()) for part in parts)
        draft, layers = self.learner.draft.settings, self.data.layers
        loader = self.data.train.state_dict()
        return TrainingState(self.learner.step, loader, draft, layers, self._settings(), self._origin, window)

    def _go_on(self, checkpoint: Path) -> None:
        saved = read_state(checkpoint)
        refuse_another(saved, self._state())
        self.data.train.load_state_dict(saved.loader)
        load_checkpoint(checkpoint, self.learner)
        with readable(checkpoint):
            self._window = self._window_of(saved)
        _log.info("going on from %s", checkpoint)

    def _window_of(self, saved: TrainingState) -> Judged | None:
        """Return this rank's part of what the steps since the last line of metrics came to.

        Under another number of ranks rank 0 takes all parts; their sums are the same but for the order of additions.
        """
        vectors = (torch.tensor(part, dtype=torch.float64, device=self.ranks.device) for part in saved.window)
        parts = [Judged.of_vector(vector) for vector in vectors]
        if len(parts) == self.ranks.size:
            return parts[self.ranks.rank]
        return functools.reduce(operator.add, parts) if parts and self.ranks.leads else None

    def _open_journal(self) -> Journal | None:
        """Open the metrics on rank 0; what is later than a named checkpoint is set aside first."""
        if not self.ranks.leads:
            return None
        output, step, check = Path(self.config.output_dir), self.learner.step, self._hold.check
        if self.config.resume_from is not None:
            past = any(line.step > step for line in read_metrics(output))
            check()
            number = set_aside(self._checkpoints, step, [output / METRICS] if past else [])
            if number is not None:
                _log.info("what was made after step %d is kept under names that end with .aside-%d", step, number)
            self._spared = tuple(path.name for path in checkpoints(self._checkpoints))
        return Journal(output, step, tensorboard=self.config.tensorboard, check=check)

    def _settings(self) -> dict[str, object]:
        """Return what decides the course of the training."""
        values = {name: value for name, value in dataclasses.asdict(self.config).items() if name not in _EXEMPT}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _summary(self, figures: dict[str, float], before: int, seconds: float) -> list[str]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = f"at most {size_text(peak)} of memory"
        if self.ranks.device.type == "cuda":
            memory += f", {size_text(torch.cuda.max_memory_allocated(self.ranks.device))} of the device's"
        waited = f"waited for data {self.waiting_share:.1%} of the steps' time"
        after = f" after the {before} that were there" if before else ""
        lines = [f"{self.learner.step - before} steps{after} in {seconds:.0f} s; {waited}; {memory}"]
        if figures:
            lines.append(f"validation: loss {figures['loss']:.4f}, tau {figures.get('tau', 1.0):.3f}")
        return lines
