"""Running some real rows through the target, to learn what their states come to and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import cast

import torch

from dspark_store.format.token_shards import TokenRows
from dspark_store.inspection.estimate.measurement import RowStates, TrialEncoder
from dspark_store.precompute.job import Job
from dspark_store.precompute.job_target import JobTarget, plan_target
from dspark_store.precompute.ranks import join_world
from dspark_store.target.batches import batches_of, padded_batch
from dspark_store.target.capture import StageStates

type _Capture = Callable[[torch.Tensor, torch.Tensor], StageStates]


def measure_target(job: Job, encoder: TrialEncoder) -> str:
    """Run the rows of a measurement through the target in the job's batches, and encode their states and its tables.

    Returns the kind of device that it ran on. Raises what loading a target raises, ValueError under torchrun, and
    StoppedError when the process is told to end.
    """
    with join_world() as world:
        if world.size > 1:
            raise ValueError("an estimate runs the target in one process: start it without torchrun")
        shape = plan_target(job.config, 1, job.target)
        target = JobTarget(job.config, world, shape.plan, shape.num_layers)
        with target.groups_open():
            tables = target.loaded.weights()
            if tables is None:
                raise RuntimeError("one process was given no vocabulary tables")
            stored = [tables.embedding, *([] if tables.facts["tied"] else [tables.head])]
            encoder.encode_tables([*stored, *([] if tables.head_bias is None else [tables.head_bias])])
            capture = target.loaded.capture(job.new_record.schema.layer_ids)
            trial = _Trial(job, encoder, capture, target.input_device, world.watch.check)
            encoder.encode_states(trial.run())
            encoder.measurement.positions_per_second = trial.positions_per_second
        return target.device.type


class _Trial:
    """The forwards of a measurement's rows."""

    def __init__(
        self, job: Job, encoder: TrialEncoder, capture: _Capture, device: torch.device, check: Callable[[], None]
    ) -> None:
        self._job = job
        self._rows = encoder.measurement.rows
        self._capture = capture
        self._device = device
        self._check = check
        self.positions_per_second = 0.0

    def run(self) -> Iterator[RowStates]:
        """Yield the states of every row. The first forward warms up: its time counts where it is the only one."""
        tokens = TokenRows([row.ids for row in self._rows], [row.mask for row in self._rows])
        positions, seconds = 0, 0.0
        for number, batch in enumerate(batches_of(tokens.lengths, self._job.config.batch_size)):
            self._check()
            pad, vocab_size = (cast(int, self._job.manifest[name]) for name in ("pad_token_id", "target_vocab_size"))
            ids, attention = padded_batch(tokens, batch, pad, vocab_size)
            started = time.perf_counter()
            states = self._forward(ids, attention)
            spent = time.perf_counter() - started
            positions, seconds = (ids.numel(), spent) if number < 2 else (positions + ids.numel(), seconds + spent)
            for position, row in enumerate(batch):
                yield row, [layer[position, : len(self._rows[row])] for layer in states]
        self.positions_per_second = positions / seconds

    def _forward(self, ids: torch.Tensor, attention: torch.Tensor) -> list[torch.Tensor]:
        """Return the states of a batch in slot order, then the last, all on the CPU, as the compute dtype has them."""
        found = self._capture(ids.to(self._device), attention.to(self._device))
        if found.last is None:
            raise RuntimeError("one process was given no last hidden states")
        return [states.cpu() for states in (*found.layers, found.last)]
