"""Layers of the target: which states are captured, and cutting a target to its first layers.

Layer ids count the target's N decoder layers from 0 and follow the offset-by-one convention of
`output_hidden_states`: -1 is the input of the first layer, an id below N - 1 the output of that layer, and N - 1 the
output of the final norm.
"""

import logging
import operator
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

EMBEDDING_LAYER_ID = -1


def build_target_layer_ids(num_layers: int, num_draft_layers: int) -> list[int]:
    """Spread `num_draft_layers` ids evenly over layers 1 to `num_layers` - 1, both included.

    The count is clamped into [1, num_layers - 1]; one id is the last layer alone. Points between two layers are rounded
    half to even. This is the default of NeMo Automodel's DSpark recipes.

    Raises ValueError when the target has fewer than two layers.
    """
    if num_layers < 2:
        raise ValueError(f"cannot choose layer ids for a target of {num_layers} layers: at least 2 are needed")
    last = num_layers - 1
    count = min(max(num_draft_layers, 1), last)
    if count == 1:
        return [last]
    return sorted({round(1 + index * (last - 1) / (count - 1)) for index in range(count)})


def validate_target_layer_ids(ids: Sequence[int], num_layers: int, *, explicit: bool = True) -> list[int]:
    """Return `ids` as a list of ints after checking them against a target of `num_layers` layers.

    `explicit` says that a job is to capture them; only then is it worth a warning that SGLang has no capture point for
    -1 and `num_layers` - 1 and cannot serve a draft that reads them.

    Raises ValueError when `ids` is empty, not strictly increasing, not of integers, or leaves [-1, num_layers - 1].
    """
    expected = f"one or more strictly increasing integers, each -1 or in [0, {num_layers - 1}]"
    try:
        layer_ids = [operator.index(layer_id) for layer_id in ids]
    except TypeError as error:
        raise ValueError(f"layer ids {ids!r} are not valid: expected {expected}") from error
    in_range = all(EMBEDDING_LAYER_ID <= layer_id < num_layers for layer_id in layer_ids)
    increasing = all(lower < upper for lower, upper in pairwise(layer_ids))
    if not layer_ids or not in_range or not increasing:
        raise ValueError(f"layer ids {layer_ids} are not valid: expected {expected}")
    unservable = [layer_id for layer_id in layer_ids if layer_id in (EMBEDDING_LAYER_ID, num_layers - 1)]
    if explicit and unservable:
        logger.warning("SGLang cannot capture layer ids %s and will not serve a draft that reads them", unservable)
    return layer_ids


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

    Every list with one entry per layer is cut, and so are the overrides of single layers and the count of layers that
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
