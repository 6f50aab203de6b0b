"""What is known of a target beside its states: tables, head, configuration, and what it can take.

A draft needs its two vocabulary tables and how its head makes logits; a precompute judges without any weight whether it
can be captured and how many positions and which ids it takes.
"""

import inspect
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.target.capture import TargetCapture
from dspark_store.target.layers import EMBEDDING_LAYER_ID, cut_target_config
from dspark_store.target.load import language_model_class, text_config

logger = logging.getLogger(__name__)

# Fields that say where a configuration came from and how the weights were stored or loaded, not what the target is.
_PROVENANCE_FIELDS = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "quantization_config", "gguf_file", "dtype"}
)
_SCALINGS = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
_CAPPINGS = ("final_logit_softcapping", "logits_soft_cap")
_MULTIPLIES_BY_LOGITS_SCALING = frozenset({"hyperclovax", "hyperclovax_vision_v2"})
_POSITION_TABLE_NAMES = ("wpe", "pos")
_SPARE_ROWS = 8  # OPT and its kin keep the first two rows of the table for padding


def head_facts(model_or_config: PreTrainedModel | PretrainedConfig) -> dict[str, JsonValue]:
    """Describe how the target makes logits from last hidden states, and hidden states from embedding rows.

    `head_bias` and `tied` are booleans. `logit_scale` multiplies the head's output, `final_logit_softcapping` c then
    maps each logit x to c tanh(x / c), and `embedding_scale` multiplies the embedding's rows; each is None where the
    target does no such thing. A configuration is judged by a model built from it without weights.

    Raises ValueError as `target_weights` does.
    """
    model = model_or_config
    if isinstance(model, PretrainedConfig):
        model = model_without_weights(model)
    config = text_config(model.config)
    embedding, head = _vocabulary_modules(model)
    scaling, capping = (_names_applied(model, head, names) for names in (_SCALINGS, _CAPPINGS))
    return {
        "head_bias": getattr(head, "bias", None) is not None,
        "logit_scale": _scale(_logit_scale(config)) if scaling else None,
        "final_logit_softcapping": _number(config, *_CAPPINGS) if capping else None,
        "embedding_scale": _scale(_embedding_scale(embedding, config)),
        "tied": _are_tied(model, embedding, head),
    }


def target_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the weights of the input embedding (V, H) and of the head (V, H), and the head's bias (V,) or None.

    They are the model's own tensors, not copies, except where a device map offloaded them; tied weights are one
    tensor. The embedding is unscaled.

    Raises ValueError naming the side that has no weight of two dimensions.
    """
    embedding, head = _vocabulary_modules(model)
    embed, _ = _tables(embedding)
    table, bias = _tables(head)
    return embed, embed if _are_tied(model, embedding, head) else table, bias


def target_config_json(config: PretrainedConfig) -> dict[str, JsonValue]:
    """Return the text part of `config` as plain JSON, from which `rebuild_config` makes it again.

    Paths, versions and storage are left out, so that a configuration gives the same before and after its model is
    loaded, whatever the compute dtype.
    """
    fields = json.loads(text_config(config).to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in _PROVENANCE_FIELDS}


def rebuild_config(fields: dict[str, JsonValue]) -> PretrainedConfig:
    """Make the configuration that `target_config_json` described.

    Raises ValueError when the installed transformers does not know its model type.
    """
    decoded = PretrainedConfig._decode_special_floats(fields)
    model_type = str(decoded.get("model_type", ""))
    try:
        config_class = type(AutoConfig.for_model(model_type))
    except ValueError as error:
        raise ValueError(
            f"target configuration has model_type={model_type!r}, which the installed transformers does not know: "
            "install a version that does"
        ) from error
    layer_types = list(decoded.get("layer_types") or ())
    config = config_class.from_dict(decoded)
    if layer_types:
        config.layer_types = layer_types  # Gemma 4 replaces the last one where a target was cut at another type
    return config


def model_without_weights(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the language model of `config` on the meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        model = language_model_class(config).from_config(  # type: ignore[no-untyped-call]  # untyped in transformers
            config, trust_remote_code=trust_remote_code
        )
    return cast(PreTrainedModel, model)


def _vocabulary_modules(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    embedding: nn.Module | None = model.get_input_embeddings()
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
    for side, module in (("input embedding", embedding), ("output head", head)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ValueError(
                f"the {side} of {type(model).__name__} has no .weight of shape (vocabulary, hidden size): "
                f"found {type(module).__name__}"
            )
    return cast(nn.Module, embedding), cast(nn.Module, head)


def _names_applied(model: PreTrainedModel, head: nn.Module, names: Sequence[str]) -> bool:
    """Whether the forward that runs `head` does what the text configuration says under one of `names`.

    A causal language model does. One that takes a text model in beside images may run that model's body under a head of
    its own, and leave it out, as Cohere's do.
    """
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(model.config, "auto_map", None):
        return True
    owner = next(module for module in model.modules() if any(child is head for child in module.children()))
    return not {*names}.isdisjoint(inspect.unwrap(type(owner).forward).__code__.co_names)


def _are_tied(model: PreTrainedModel, embedding: nn.Module, head: nn.Module) -> bool:
    if embedding.weight is head.weight or not hasattr(head, "_hf_hook"):
        return embedding.weight is head.weight
    name = next(name for name, module in model.named_modules() if module is head)
    return f"{name}.weight" in model.all_tied_weights_keys  # a forward gives offloaded modules new parameters


def _tables(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a module, brought into memory when a device map keeps them elsewhere."""
    with _in_memory(module):
        bias = getattr(module, "bias", None)
        return cast(Tensor, module.weight).detach(), bias.detach() if isinstance(bias, Tensor) else None


def _in_memory(module: nn.Module) -> AbstractContextManager[None]:
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device  # it is what offloaded the module

    return cast("AbstractContextManager[None]", align_module_device(module))


def _logit_scale(config: PretrainedConfig) -> float | None:
    """Cohere and Falcon-H1 multiply, Granite and MiniCPM divide, HyperCLOVA X multiplies under Granite's name."""
    *multipliers, divisor = _SCALINGS
    scale, scaling = _number(config, *multipliers), _number(config, divisor)
    if scale is not None or scaling is None:
        return scale
    return scaling if config.model_type in _MULTIPLIES_BY_LOGITS_SCALING else 1.0 / scaling


def _embedding_scale(embedding: nn.Module, config: PretrainedConfig) -> float | None:
    """Some embeddings scale their own output; other models multiply it by a number of the configuration."""
    for name in ("scalar_embed_scale", "embed_scale"):
        value = getattr(embedding, name, None)
        if isinstance(value, int | float):
            return float(value)
    return _number(config, "embedding_multiplier")


def _number(config: PretrainedConfig, *names: str) -> float | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            return float(value)
    return None


def _scale(value: float | None) -> float | None:
    return None if value == 1.0 else value


@dataclass(frozen=True, slots=True)
class VocabularyWeights:
    """The tables as `target_weights` gives them, whole and on the CPU, and `head_facts`.

    `embedding` and `head` are (V, H), one tensor where the facts say that they are tied; `head_bias` is (V,) or None.
    """

    embedding: Tensor
    head: Tensor
    head_bias: Tensor | None
    facts: dict[str, JsonValue]


def gather_vocabulary(model: PreTrainedModel, *, keep: bool) -> VocabularyWeights | None:
    """Gather the tables of `model` from all ranks that share them; return them where `keep`, else None."""
    facts = head_facts(model)
    embedding, head, bias = target_weights(model)
    whole = _whole(embedding, keep=keep)
    whole_head = whole if facts["tied"] else _whole(head, keep=keep)
    whole_bias = None if bias is None else _whole(bias, keep=keep)
    if whole is None or whole_head is None:
        return None
    return VocabularyWeights(whole, whole_head, whole_bias, facts)


def _whole(weight: Tensor, *, keep: bool) -> Tensor | None:
    whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach().cpu() if keep else None


def check_capturable(config: PretrainedConfig) -> None:
    """Raise ValueError, which says what is missing, when the states of the target of `config` cannot be captured.

    A model of its own code is not built for a look: it is judged when it is loaded.
    """
    if not getattr(config, "auto_map", None):
        TargetCapture(model_without_weights(config), [EMBEDDING_LAYER_ID])


def check_fits(config: PretrainedConfig, seq_length: int, vocab_size: int) -> None:
    """Compare S and the size of the tokenizer's vocabulary with a configuration, before any weight is loaded.

    Positions past those of a rotary target, and token ids past its embedding, give one warning each: the first may give
    poor states, the second are an error only where a text has such an id (`padded_batch`).

    Raises ValueError when the target looks positions up in a table of fewer than `seq_length` rows.
    """
    text = text_config(config)
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < seq_length:
        if _has_position_table(config, positions):
            raise ValueError(
                f"seq-length {seq_length} does not fit a {text.model_type} target, whose position table has "
                f"{positions} rows: pass --seq-length {positions} or less"
            )
        logger.warning(
            "seq-length %d is beyond the %d positions that the %s target was made for (max_position_embeddings)",
            seq_length,
            positions,
            text.model_type,
        )
    if vocab_size > text.vocab_size:
        logger.warning(
            "the tokenizer has token ids up to %d, the target only %d embedding rows (vocab_size): "
            "a text with a higher id cannot be captured",
            vocab_size - 1,
            text.vocab_size,
        )


def _has_position_table(config: PretrainedConfig, positions: int) -> bool:
    """Whether the model keeps a table with a row per position, learned or computed; judged by its first layer."""
    if getattr(text_config(config), "rope_parameters", None) or getattr(config, "auto_map", None):
        return False  # rotary frequencies are computed; a model of its own code is not built for a look
    model = model_without_weights(cut_target_config(config, 1))
    tables: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return any(_is_position_table(name, table, positions) for name, table in tables.items())


def _is_position_table(name: str, table: torch.Tensor, positions: int) -> bool:
    named_so = any(part in name for part in _POSITION_TABLE_NAMES)
    return named_so and table.dim() == 2 and positions <= table.shape[0] <= positions + _SPARE_ROWS
