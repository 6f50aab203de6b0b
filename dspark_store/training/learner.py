"""One step of learning: micro-batches through draft and loss, their gradients, the learning rate and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dspark_store.draft.anchors import Blocks, draw_blocks, sample_keys
from dspark_store.draft.loss import DraftCounts, LossSums, draft_counts, loss_sums, slot_terms
from dspark_store.draft.model import Draft, DraftOutput
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.training.ranks import Ranks
from dspark_store.training.settings import TrainConfig

LEAST_WARMUP = 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the learning rate is multiplied by at each of ``total`` steps, counted from 0."""

    total: int
    warmup: int
    least: float = 0.1

    def multiplier(self, step: int) -> float:
        """Return (step + 1) / warmup while that is below one, then a cosine from 1 to ``least``."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * progress)) / 2


def warmup_steps(ratio: float, total: int, least: int = LEAST_WARMUP) -> int:
    """Return the steps of the warm-up: ``ratio`` of all, but not fewer than ``least``; 1 for no ratio above 0."""
    return max(least, int(ratio * total)) if ratio > 0 else 1


_BETAS = (0.9, 0.95)
TERMS = ("loss", "cross_entropy", "distance", "confidence")


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of some micro-batches: their number, the sums of their losses and terms by name, and the counts."""

    micro_batches: int
    terms: Tensor
    counts: DraftCounts

    def __add__(self, other: Judged) -> Judged:
        number = self.micro_batches + other.micro_batches
        return Judged(number, self.terms + other.terms, self.counts + other.counts)

    def vector(self) -> Tensor:
        """Return all sums as one vector (2 K + 11,) fp64, for a single all-reduce and for checkpoints."""
        return torch.cat([self.terms.new_tensor([self.micro_batches]), self.terms, self.counts.vector()])

    @classmethod
    def of_vector(cls, vector: Tensor) -> Judged:
        """Return the sums that `vector` made one vector of."""
        number, terms, counts = vector.tensor_split([1, 1 + len(TERMS)])
        return cls(int(number), terms, DraftCounts.of_vector(counts))

    def figures(self, ranks: Ranks) -> dict[str, float]:
        """Return losses averaged over the micro-batches of all ranks, and rates from counts summed over them."""
        total = Judged.of_vector(ranks.total(self.vector()))
        means = {name: term / total.micro_batches for name, term in zip(TERMS, total.terms.tolist(), strict=True)}
        return {**means, **total.counts.rates()}


class Learner:
    """A draft, its optimizer, and how many steps they have behind them."""

    def __init__(self, draft: Draft, config: TrainConfig, schedule: Schedule, ranks: Ranks) -> None:
        self.draft = draft.to(ranks.device)
        self.ranks = ranks
        self.schedule = schedule
        self.step = 0
        self._config = config
        self._model: Draft | DistributedDataParallel = self.draft
        if ranks.size > 1:
            devices = [ranks.device] if ranks.device.type == "cuda" else None
            self._model = DistributedDataParallel(self.draft, device_ids=devices, broadcast_buffers=False)
        self.optimizer = torch.optim.AdamW(
            self.draft.trainable(), lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay
        )

    def accumulate(self, batch: Mapping[str, Tensor], epoch: int, *, last: bool) -> Judged:
        """Add a micro-batch's gradient to those of this step; ``last`` says that the step ends with it.

        Ranks divide by the weight of all their slots together. A rank's gradients are shared with the ``last`` one.
        """
        with self._sharing(last):
            output, sums, blocks = self._judge(batch, epoch)
            weight = self.ranks.total(sums.weight) / self.ranks.size
            loss = sums.total(self._config.loss_weights, weight)
            (loss / self._config.accumulate).backward()  # type: ignore[no-untyped-call]
        return _judged(loss, output, sums, blocks)

    def update(self, pending: int) -> tuple[float, float]:
        """End a step of ``pending`` micro-batches; return the norm of its gradient, before clipping, and its rate.

        A step of fewer than it should have counts them as if they were all. FloatingPointError when the gradient is
        not finite; the draft is then as it was.
        """
        parameters = list(self.draft.trainable())
        if pending < self._config.accumulate:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._config.accumulate / pending)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.clip))
        if not norm < float("inf"):
            raise FloatingPointError(
                f"the gradient of step {self.step + 1} is not finite ({norm}): lower --learning-rate, or look at the "
                "store with dspark-store verify"
            )
        rate = self._config.learning_rate * self.schedule.multiplier(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return norm, rate

    def validate(self, batch: Mapping[str, Tensor]) -> Judged:
        """Judge a batch without learning from it; its anchors are the same at every validation."""
        self.draft.eval()
        try:
            with torch.no_grad():
                output, sums, blocks = self._judge(batch, epoch=0, model=self.draft)
                return _judged(sums.total(self._config.loss_weights), output, sums, blocks)
        finally:
            self.draft.train()

    def _judge(
        self, batch: Mapping[str, Tensor], epoch: int, model: Draft | None = None
    ) -> tuple[DraftOutput, LossSums, Blocks]:
        config, device, dtype = self._config, self.ranks.device, self._config.compute_dtype
        ids, mask = batch[IDS].to(device), batch[MASK].to(device)
        keys = sample_keys(batch["sample"], ids.shape[1], seed=config.seed, epoch=epoch).to(device)
        blocks = draw_blocks(ids, mask, keys, num_anchors=config.num_anchors, block_size=config.block_size)
        states, last = (batch[name].to(device, dtype) for name in (LAYERS, LAST))
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            output: DraftOutput = (self._model if model is None else model)(states, blocks)
            terms = slot_terms(self.draft, output, last, blocks)
        return output, loss_sums(terms, output.confidence, blocks, config.gamma), blocks

    @contextmanager
    def _sharing(self, share: bool) -> Iterator[None]:
        alone = share or not isinstance(self._model, DistributedDataParallel)
        with nullcontext() if alone else cast(DistributedDataParallel, self._model).no_sync():
            yield


def _judged(loss: Tensor, output: DraftOutput, sums: LossSums, blocks: Blocks) -> Judged:
    means = sums.means()
    terms = [loss.detach(), *(means.get(name, torch.zeros_like(loss.detach())) for name in TERMS[1:])]
    return Judged(1, torch.stack(terms).double(), draft_counts(output.confidence, sums, blocks))


def nothing_judged(config: TrainConfig, device: torch.device) -> Judged:
    """Return what no micro-batch came to, for a rank that had none."""
    zeros = torch.zeros(2 * config.block_size + 6, dtype=torch.float64, device=device)
    return Judged(0, zeros[: len(TERMS)], DraftCounts.of_vector(zeros))
