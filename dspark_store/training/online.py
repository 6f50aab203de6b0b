"""A live target in a store's place: the tokens stand in a store without states, and the states are made as asked for.

A sample's states come from the very batch that a precompute would capture it in, run by the same code, so that they
are the stored ones bit by bit. With a capture batch of several samples each of them is run again for every one of them
that a training batch does not share; a batch size of 1 in the precompute's file avoids that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from dspark_store.format.dtypes import rounded_states
from dspark_store.format.jsonvalue import JsonValue
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.metadata import has_store, read_metadata, write_metadata
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.storage import LocalStorage, Storage
from dspark_store.precompute.job import Job, check_identity, plan_job
from dspark_store.precompute.job_target import describe_target
from dspark_store.precompute.recompute import captured_again
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.tokenise import tokenise
from dspark_store.readers.batch import SpanReader
from dspark_store.readers.cache import Cache
from dspark_store.readers.index import TargetWeights
from dspark_store.readers.plan import SampleSpan
from dspark_store.target.batches import BatchLimit
from dspark_store.target.capture import CapturedStates, TargetCapture
from dspark_store.target.device import resolve_compute_dtype
from dspark_store.target.facts import head_facts, target_weights
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from dspark_store.training.ranks import Ranks


class LiveCache(Cache):
    """Reads tokens from a store whose states are not captured, and has the target make the states."""

    def __init__(self, storage: Storage, model: PreTrainedModel, device: torch.device, limit: BatchLimit) -> None:
        super().__init__(storage, allow_incomplete=True)
        self._model = model
        self.reader = LiveReader(self, model, device, limit)

    @property
    def can_train(self) -> bool:
        """Whether a loader may give its samples."""
        return True

    @property
    def status(self) -> np.ndarray:
        """(N,) uint8: 0 throughout, since no state was looked at."""
        return np.zeros(len(self), np.uint8)

    @property
    def head(self) -> Mapping[str, JsonValue]:
        """What a draft must know of the target beside its embedding and head."""
        return head_facts(self._model)

    def weights(self) -> TargetWeights:
        """Return the target's embedding and head, as a store would keep them."""
        embed, head, bias = target_weights(self._model)
        kept = [None if table is None else table.to("cpu", self.dtype) for table in (embed, head, bias)]
        return TargetWeights(cast(torch.Tensor, kept[0]), cast(torch.Tensor, kept[1]), kept[2])


class LiveReader(SpanReader):
    """Fills batches: tokens by the store's own reader, states by running the target."""

    def __init__(self, cache: Cache, model: PreTrainedModel, device: torch.device, limit: BatchLimit) -> None:
        self._cache, self._stored = cache, cache.reader
        self._again = partial(captured_again, cache, TargetCapture(model, cache.layer_ids), device, limit)

    def read(self, spans: Sequence[SampleSpan], slots: Sequence[int], batch: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors of a batch, by column, with spans of samples; see `SpanReader.read`."""
        self._stored.read(spans, slots, {name: batch[name] for name in (IDS, MASK) if name in batch})
        wanted = {name: batch[name] for name in (LAYERS, LAST) if name in batch}
        for tensor in wanted.values():
            tensor.zero_()
        samples = [span.sample for span in spans] if wanted else []
        for captured, members, states in self._again(samples):
            for span in spans:
                if span.sample in captured and span.sample - captured.start in members:
                    self._fill(wanted, span, states, members.index(span.sample - captured.start), slots)

    def close(self) -> None:
        """Let go of threads and open objects."""
        self._stored.close()

    def _fill(
        self,
        wanted: Mapping[str, torch.Tensor],
        span: SampleSpan,
        states: CapturedStates,
        member: int,
        slots: Sequence[int],
    ) -> None:
        width, place = self._cache.schema.hidden_size, slice(span.place, span.place + span.stop - span.start)
        for name, tensor in wanted.items():
            sources = [states.last] if name == LAST else [states.layers[slot] for slot in slots]
            for layer, source in enumerate(sources):
                state = source[member, span.start : span.stop].to("cpu", self._cache.dtype)
                state = rounded_states(state, self._cache.schema.mantissa_bits)
                if name == LAYERS and tensor.dim() == 4:
                    tensor[span.batch, layer, place] = state
                else:
                    tensor[span.batch, place, layer * width : (layer + 1) * width] = state


def open_live(
    config: PrecomputeConfig,
    ranks: Ranks,
    check: Callable[[], None] = lambda: None,
    *,
    allow_reduced_depth: bool = False,
) -> LiveCache:
    """Tokenise a precompute's data into its ``output_dir``, load its target on every rank, and return both as one.

    ``check`` is called between writes, and may raise to stop.

    Tokens that stand there already are used, if they are of the same job. ``allow_reduced_depth`` is that of
    `open_cache`. ValueError, OSError or ImportError for what a user can get wrong; ValueError for a target that needs
    several ranks or devices.
    """
    config.check()
    if config.device_map is not None or (config.tp_size, config.ep_size, config.pp_size, config.fsdp_size) != (1,) * 4:
        raise ValueError(
            "the file of --online shares the target over devices; online training runs a whole target on each rank"
        )
    target = describe_target(config)
    depth = int(target.text.num_hidden_layers)
    if depth < target.depth and not allow_reduced_depth:
        raise ValueError(
            f"the file of --online cuts the target to its first {depth} of {target.depth} layers "
            "(target_num_hidden_layers): run the whole target, or pass --allow-reduced-depth"
        )
    storage = LocalStorage(config.output_dir)
    if ranks.leads:
        recorded = read_metadata(storage).record if has_store(storage) else None
        _write_tokens(plan_job(config, target, recorded), storage, recorded, check)
    ranks.wait()
    device = ranks.device if ranks.device.type == "cuda" else config.resolved_device
    model = load_target(
        TargetSource(config.target_model, config.trust_remote_code),
        dtype=resolve_compute_dtype(config.compute_dtype, device),
        device=device,
        attn_implementation=config.target_attn_implementation,
        num_layers=config.target_num_hidden_layers,
    )
    return LiveCache(storage, model, device, config.batch_limit)


def _write_tokens(job: Job, storage: LocalStorage, recorded: StoreRecord | None, check: Callable[[], None]) -> None:
    record = recorded or job.new_record
    if recorded is not None:
        check_identity(recorded, job.new_record, job.config)
    else:
        write_metadata(storage, record)
    if record.phase == "tokens":
        tokenise(storage, record, job.source, check)
