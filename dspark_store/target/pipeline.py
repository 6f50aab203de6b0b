"""A pipeline of stages: each rank holds some of the layers and hands the states on to the next.

Every stage runs the model's whole forward on the same batch, with the layers of other stages replaced by ones that do
nothing, so that whatever the model makes for its layers (positions, masks, ids) is what they expect. Only the states
that enter a stage's first layer come from the stage before. Sends do not wait: a stage begins its next batch while the
one after it is at work.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.target.capture import StageCapture, StageStates, TargetCapture, find_base_model
from dspark_store.target.facts import VocabularyWeights, gather_vocabulary
from dspark_store.target.layers import EMBEDDING_LAYER_ID
from dspark_store.target.parallel import ParallelPlan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 4
_HEADER_LENGTH = 3 + _MOST_DIMENSIONS  # number of the message, dtype, count of dimensions, dimensions
_IN_FLIGHT = 2


class TensorChannel:
    """One direction between this rank and `peer`, its number in the default group; messages arrive in order."""

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._peer = peer
        self._group = group
        self._device = device
        self._count = 0
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Start to send `tensor`, of at most 4 dimensions; wait only while two earlier ones have not arrived."""
        tensor = tensor.detach().contiguous()
        shape = list(tensor.shape) + [0] * (_MOST_DIMENSIONS - tensor.dim())
        fields = [self._count, _DTYPES.index(tensor.dtype), tensor.dim(), *shape]
        header = torch.tensor(fields, dtype=torch.int64, device=self._device)
        self._count += 1
        self._wait_for_all_but(_IN_FLIGHT)
        for part in (header, tensor):
            work = dist.isend(part, self._peer, group=self._group)
            if work is not None:
                self._sending.append((work, part))

    def receive(self) -> Tensor:
        """Wait for the next tensor.

        Raises RuntimeError when it is not the one that is due.
        """
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
        dist.recv(header, self._peer, group=self._group)
        number, dtype, dimensions, *shape = header.tolist()
        if number != self._count:
            raise RuntimeError(f"rank {self._peer} sent message {number} where {self._count} was due")
        self._count += 1
        tensor = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._device)
        dist.recv(tensor, self._peer, group=self._group)
        return tensor

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, messages: int) -> None:
        while len(self._sending) > 2 * messages:
            work, _kept_alive = self._sending.popleft()
            work.wait()


class PipelineStage:
    """One rank's place in the chain: its layers, and the channels to the other stages."""

    def __init__(
        self,
        plan: ParallelPlan,
        rank: int,
        num_layers: int,
        groups: DeviceMesh,
        device: torch.device,
        facts: dict[str, JsonValue],
    ) -> None:
        self._facts, self._tied = facts, bool(facts["tied"])
        index = plan.place(rank).stage
        self.layers = plan.stage_layers(num_layers, index)
        self.is_first = index == 0
        self.is_last = index == plan.pp - 1
        ranks, group = plan.crew(rank), groups.get_group("pp")
        self._ends = TensorChannel(ranks[0 if self.is_last else -1], group, device)
        self._before = None if self.is_first else TensorChannel(ranks[index - 1], group, device)
        self._after = None if self.is_last else TensorChannel(ranks[index + 1], group, device)

    def keep_own(self, model: PreTrainedModel) -> None:
        """Take out of `model`, before its weights are read, what other stages hold."""
        base, layers = find_base_model(model)
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
        embedding = model.get_input_embeddings()
        for index, layer in enumerate(layers):
            if index not in self.layers:
                _replace(base, layer, OtherStagesLayer(layer))
        # A model with more than one table may want the embedding in later layers.
        tables = [module for module in base.modules() if isinstance(module, nn.Embedding)]
        embeds = self.is_first or len(tables) > 1
        if not embeds:
            _replace(base, embedding, OtherStagesEmbedding(embedding))
        if self._tied and embeds:
            head.weight = embedding.weight
        elif self._tied or not self.is_last:
            _replace(model, head, nn.Identity())
            model.all_tied_weights_keys = {}
        model._keys_to_ignore_on_load_unexpected = {".*"}  # what other stages hold

    def capture(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> StageCapture:
        """Return a function that runs a batch and gives the states of `layer_ids` that this stage holds.

        It must get the same batches, in the same order, on all stages of a crew.

        Raises ValueError as `TargetCapture` does; the function RuntimeError for a model whose layers need more than the
        states of the layer before.
        """
        capture, layers = TargetCapture(model, layer_ids), find_base_model(model)[1]
        entry, final = layers[self.layers[0]], layers[self.layers[-1]]
        slots = tuple(slot for slot, layer_id in enumerate(capture.layer_ids) if self._holds(layer_id))
        refused = f"pp does not work for model_type={model.config.model_type!r}, whose"
        tried = False

        def run(input_ids: Tensor, attention_mask: Tensor) -> StageStates:
            nonlocal tried
            received = None if self._before is None else self._before.receive()
            left: list[Tensor] = []
            handles = [final.register_forward_hook(_keep_output(left, refused))]
            if received is not None:
                handles.append(entry.register_forward_pre_hook(_put_in(received), with_kwargs=True))
            try:
                states = capture(input_ids, attention_mask)
            finally:
                for handle in handles:
                    handle.remove()
            if not tried and received is not None and left[0].isnan().any() and not received.isnan().any():
                raise RuntimeError(f"{refused} later layers need the embedding: use fsdp")
            tried = True
            if self._after is not None:
                self._after.send(left[0])
            kept = tuple(states.layers[slot] for slot in slots)
            return StageStates(slots, kept, states.last if self.is_last else None)

        return run

    def _holds(self, layer_id: int) -> bool:
        return self.is_first if layer_id == EMBEDDING_LAYER_ID else layer_id in self.layers

    def finish(self) -> None:
        """Wait until the stage after has everything."""
        if self._after is not None:
            self._after.finish()

    def weights(self, model: PreTrainedModel) -> VocabularyWeights | None:
        """Bring the head from the last stage to the first, where the tables are returned; None elsewhere."""
        if self._tied:
            return gather_vocabulary(model, keep=True) if self.is_first else None
        if self.is_last:
            head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
            for _, part in sorted(head.named_parameters(), reverse=True):  # the weight, then the bias
                self._ends.send(part)
            self._ends.finish()
        if not self.is_first:
            return None
        embedding = cast(Tensor, model.get_input_embeddings().weight).detach().cpu()
        table = self._ends.receive().cpu()
        bias = self._ends.receive().cpu() if self._facts["head_bias"] else None
        return VocabularyWeights(embedding, table, bias, self._facts)


def _keep_output(left: list[Tensor], refused: str) -> Callable[[nn.Module, object, object], None]:
    def hook(_module: nn.Module, _args: object, output: object) -> None:
        if not isinstance(output, Tensor):
            raise RuntimeError(f"{refused} layers return more than the states: use fsdp")
        left.append(output)

    return hook


class OtherStagesLayer(nn.Module):
    """Stands for a decoder layer that another stage holds: gives back the states that it gets."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":  # what the model asks of its layers, such as their type
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """Return `hidden_states`."""
        return hidden_states


class OtherStagesEmbedding(nn.Module):
    """Stands for the embedding on a later stage, where nothing should use its output: it is all NaN."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        weight = cast(Tensor, embedding.weight)
        self._width: int = weight.shape[1]
        self._dtype: torch.dtype = weight.dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return NaN (B, S, H) for `input_ids` (B, S)."""
        return torch.full((*input_ids.shape, self._width), torch.nan, dtype=self._dtype, device=input_ids.device)


def _put_in(
    states: Tensor,
) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], tuple[tuple[object, ...], dict[str, object]]]:
    def hook(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if args:
            return (states, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": states}

    return hook


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `root` has `old`."""
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)
