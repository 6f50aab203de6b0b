"""What a target can take, judged without its weights: whether it can be captured, how many positions, which ids."""

import logging

import torch
from torch import Tensor
from transformers import PretrainedConfig

from dspark_store.target.capture import TargetCapture
from dspark_store.target.depth import cut_target_config
from dspark_store.target.facts import model_without_weights
from dspark_store.target.layers import EMBEDDING_LAYER_ID
from dspark_store.target.load import text_config

logger = logging.getLogger(__name__)

_POSITION_TABLE_NAMES = ("wpe", "pos")
_SPARE_ROWS = 8  # OPT and its kin keep the first two rows of the table for padding


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
    """Whether the model keeps a table with a row a position, learned or computed; judged by its first layer."""
    if getattr(text_config(config), "rope_parameters", None) or getattr(config, "auto_map", None):
        return False  # rotary frequencies are computed; a model of its own code is not built for a look
    model = model_without_weights(cut_target_config(config, 1))
    tables: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return any(_is_position_table(name, table, positions) for name, table in tables.items())


def _is_position_table(name: str, table: torch.Tensor, positions: int) -> bool:
    named_so = any(part in name for part in _POSITION_TABLE_NAMES)
    return named_so and table.dim() == 2 and positions <= table.shape[0] <= positions + _SPARE_ROWS
