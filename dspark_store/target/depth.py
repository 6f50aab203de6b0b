"""Cutting a target to its first layers: a diagnostic, by which a target too large to run can be tried out."""

from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig


def resolve_reduced_target_layers(depth: int, requested: int | str | None) -> int | None:
    """Return how many layers of a target of `depth` layers are kept, None when no cut was `requested`.

    Raises ValueError unless `requested` is None or an integer, or the text of one, in [1, depth].
    """
    if requested is None:
        return None
    try:
        if isinstance(requested, bool | float):
            raise TypeError
        kept = int(requested)
    except (TypeError, ValueError):
        kept = 0
    if not 1 <= kept <= depth:
        raise ValueError(
            f"target_num_hidden_layers {requested!r} is not valid: expected an integer in [1, {depth}], "
            "or none for the whole target"
        )
    return kept


def cut_target_config(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return a copy of `config` whose language model has the first `num_layers` layers only, each as it was.

    Every list with one entry a layer is cut, and so are the overrides of single layers and the count of layers that
    share the keys and values of earlier ones.

    Raises ValueError when there are not that many layers, or when the target packs inputs of all layers into one table.
    """
    cut = deepcopy(config)
    text = cut.get_text_config(decoder=True)
    depth = int(text.num_hidden_layers)
    if resolve_reduced_target_layers(depth, num_layers) == depth:
        return cut
    if getattr(text, "hidden_size_per_layer_input", None):
        raise ValueError(
            f"target_num_hidden_layers {num_layers} cannot be applied to a {text.model_type} target with per-layer "
            "inputs, whose tables are packed over all layers: capture the whole target"
        )
    overrides = _layer_overrides(text)
    shared = getattr(text, "num_kv_shared_layers", None)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == depth and "token_id" not in name:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    if shared:
        text.num_kv_shared_layers = max(0, num_layers - (depth - shared))
    if overrides is not None:
        text.per_layer_config = {index: fields for index, fields in overrides.items() if index < num_layers}
    return cut


def _layer_overrides(text: PretrainedConfig) -> dict[int, Any] | None:
    """Fields that single layers override, by layer; None where all layers are of one configuration."""
    if not getattr(text, "is_heterogeneous", False):
        return None
    return {int(index): fields for index, fields in text.to_dict()["per_layer_config"].items()}
