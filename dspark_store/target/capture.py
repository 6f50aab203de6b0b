"""Capturing hidden states: one forward of the target's base model, watched by hooks.

The language model head is never run, so no (B, S, V) logits exist, and only the states that were asked for are kept.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from dspark_store.target.layers import EMBEDDING_LAYER_ID, validate_target_layer_ids

_LAYER_NAMES = ("layers", "h")
_NORM_NAMES = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm")
_INNER_MODEL_NAMES = ("model", "language_model", "text_model", "transformer", "decoder", "backbone", "base_model")
_FINAL_NORM = "final norm"

type _Key = int | str


@dataclass(frozen=True, slots=True)
class StageStates:
    """The states of one batch that this rank holds, in the target's compute dtype and on its device.

    `slots` are ascending positions in the layer ids: all of them, or those of this rank's pipeline stage. `layers` are
    the tensors (B, S, H) for them. `last` (B, S, H) is the output of the final norm, None on a rank that does not run
    it. Layer id N - 1 is `last` itself, the same tensor object.
    """

    slots: tuple[int, ...]
    layers: tuple[Tensor, ...]
    last: Tensor | None


@dataclass(frozen=True, slots=True)
class CapturedStates(StageStates):
    """The states of one batch, all of them."""

    last: Tensor


type StageCapture = Callable[[Tensor, Tensor], StageStates]
"""Runs a batch of ids and attention mask (B, S), and gives the states that this rank holds."""


class TargetCapture:
    """Runs a target and returns the states of chosen layers."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        """Find the layers and the final norm, and put the model in eval mode.

        Raises ValueError when the model has no decoder layers or no final norm under a known name, or when the layer
        ids do not fit it.
        """
        self._base, self._layers = find_base_model(model)
        self._norm = _find_final_norm(self._base)
        self.num_layers = len(self._layers)
        self.layer_ids = tuple(validate_target_layer_ids(layer_ids, self.num_layers, explicit=False))
        self._keywords = _accepted_keywords(self._base)
        declared = inspect.signature(self._base.forward).parameters
        self._past_name = "cache" if "cache" in declared else "past_key_values"  # the older name is going out of use
        model.eval()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, past: Cache | None = None) -> CapturedStates:
        """Run one forward over `input_ids` (B, S) under `attention_mask` (B, S), both on the target's device.

        With a `past`, the ids go on where it ends, the mask is as long as both, and the past grows by them.

        A layer id of -1 is the input of the first layer: the embedding with whatever scale or position the model adds
        to it. States of hyper-connection targets, (B, S, m, H), are averaged over m.

        Raises RuntimeError when the forward passes by the final norm or a layer.
        """
        states: dict[_Key, Tensor] = {}
        handles: list[RemovableHandle] = []
        arguments: dict[str, object] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if past is not None:
            arguments |= {self._past_name: past, "use_cache": True}
        arguments = self._accepted(arguments)
        try:
            self._register_hooks(states, handles)
            with torch.no_grad():
                self._base(**arguments)
        finally:
            for handle in handles:
                handle.remove()
        return self._collect(states)

    def _accepted(self, arguments: dict[str, object]) -> dict[str, object]:
        if self._keywords is None:
            return arguments
        return {name: value for name, value in arguments.items() if name in self._keywords}

    def _register_hooks(self, states: dict[_Key, Tensor], handles: list[RemovableHandle]) -> None:
        """Add the hooks one by one to `handles`, so that those in place are known when a later one fails."""
        for layer_id in self.layer_ids:
            if layer_id == EMBEDDING_LAYER_ID:
                hook = _keep_input(states, layer_id)
                handles.append(self._layers[0].register_forward_pre_hook(hook, with_kwargs=True))
            elif layer_id < self.num_layers - 1:
                handles.append(self._layers[layer_id].register_forward_hook(_keep_output(states, layer_id)))
        handles.append(self._norm.register_forward_hook(_keep_output(states, _FINAL_NORM)))

    def _collect(self, states: dict[_Key, Tensor]) -> CapturedStates:
        last = _state(states, _FINAL_NORM)
        if last.dim() != 3:
            raise RuntimeError(f"the final norm gave a state of shape {tuple(last.shape)}: expected (B, S, H)")
        layers = (
            last if layer_id == self.num_layers - 1 else _averaged_streams(_state(states, layer_id))
            for layer_id in self.layer_ids
        )
        return CapturedStates(tuple(range(len(self.layer_ids))), tuple(layers), last)


def _keep_output(states: dict[_Key, Tensor], key: _Key) -> Callable[[nn.Module, object, object], None]:
    def hook(_module: nn.Module, _args: object, output: object) -> None:
        state = output[0] if isinstance(output, tuple | list) else output
        if isinstance(state, Tensor):
            states[key] = state

    return hook


def _keep_input(
    states: dict[_Key, Tensor], key: _Key
) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]:
    def hook(_module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        state = args[0] if args else kwargs.get("hidden_states")
        if isinstance(state, Tensor):
            states[key] = state

    return hook


def _state(states: dict[_Key, Tensor], key: _Key) -> Tensor:
    if key not in states:
        name = key if isinstance(key, str) else f"layer {key}"
        raise RuntimeError(f"the forward gave no output of the {name}: the target does not use it, or not as a module")
    return states[key]


def _averaged_streams(state: Tensor) -> Tensor:
    return state.mean(dim=2) if state.dim() == 4 else state


def find_base_model(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Search breadth first for the module that owns the decoder layers; return it and its layers in order.

    Raises ValueError when there is none under a known name.
    """
    queue, seen = deque([model]), {id(model)}
    while queue:
        module = queue.popleft()
        layers = _decoder_layers(module)
        if layers:
            return module, layers
        for inner in _children(module, _INNER_MODEL_NAMES):
            if id(inner) not in seen:
                seen.add(id(inner))
                queue.append(inner)
    raise ValueError(
        f"cannot capture {type(model).__name__}: no module with decoder layers under {' or '.join(_LAYER_NAMES)} was "
        f"found through {', '.join(_INNER_MODEL_NAMES)}"
    )


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of `module` in order, from a list or from a dict keyed "0", "1", ...; empty when it owns none."""
    for layers in _children(module, _LAYER_NAMES):
        if isinstance(layers, nn.ModuleDict):
            return [layers[str(index)] for index in range(len(layers))]
        if isinstance(layers, nn.ModuleList | nn.Sequential):
            return list(layers)
    return []


def _find_final_norm(base: nn.Module) -> nn.Module:
    for norm in _children(base, _NORM_NAMES):
        return norm
    raise ValueError(f"cannot capture {type(base).__name__}: it has no final norm under {', '.join(_NORM_NAMES)}")


def _children(module: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            yield child


def _accepted_keywords(module: nn.Module) -> frozenset[str] | None:
    """Keywords that the forward of `module` declares, None when it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
