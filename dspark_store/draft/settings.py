"""The shape of a draft: what it takes over from its target, and what is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from dspark_store.format.jsonvalue import JsonValue

type MarkovKind = Literal["vanilla", "gated", "rnn", "none"]

MARKOV_KINDS: tuple[str, ...] = get_args(MarkovKind.__value__)

_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Everything that the shapes and the arithmetic of a draft follow from.

    A block is ``block_size`` slots: the first holds the anchor token, the others ``mask_token_id``; slot k predicts the
    token k + 1 after the anchor. ``captured_layers`` layers of the target, concatenated, are the context.
    ``logit_scale``, ``final_logit_softcapping``, ``embedding_scale`` and ``head_bias`` are the target's own, which the
    draft shares. ValueError names the first size that cannot be.
    """

    vocab_size: int
    hidden_size: int
    captured_layers: int
    mask_token_id: int
    num_layers: int = 5
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = _DEFAULT_ROPE_THETA
    block_size: int = 7
    markov: MarkovKind = "vanilla"
    markov_rank: int = 256
    confidence: bool = True
    confidence_with_markov: bool = True
    logit_scale: float | None = None
    final_logit_softcapping: float | None = None
    embedding_scale: float | None = None
    head_bias: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "captured_layers", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "intermediate_size", "block_size", "markov_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a draft must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since rotations pair its features; got {self.head_dim}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.markov not in MARKOV_KINDS:
            raise ValueError(f"markov must be one of {', '.join(MARKOV_KINDS)}, got {self.markov!r}")

    @classmethod
    def of_target(cls, config: Mapping[str, JsonValue], captured_layers: int, mask_token_id: int) -> DraftSettings:
        """Take the sizes of attention and MLP, and the rotation, from a target's text configuration.

        ValueError names a field that it lacks.
        """
        hidden, heads = _whole(config, "hidden_size", "n_embd"), _whole(config, "num_attention_heads", "n_head")
        return cls(
            vocab_size=_whole(config, "vocab_size"),
            hidden_size=hidden,
            captured_layers=captured_layers,
            mask_token_id=mask_token_id,
            num_heads=heads,
            num_kv_heads=int(_optional(config, "num_key_value_heads") or heads),
            head_dim=int(_optional(config, "head_dim") or hidden // heads),
            intermediate_size=int(_optional(config, "intermediate_size", "n_inner") or 4 * hidden),
            rms_norm_eps=_optional(config, "rms_norm_eps", "layer_norm_epsilon") or 1e-6,
            rope_theta=_rope_theta(config),
        )

    @property
    def confidence_sees_markov(self) -> bool:
        """Whether the confidence head is shown the previous token."""
        return self.confidence_with_markov and self.markov != "none"


def _rope_theta(config: Mapping[str, JsonValue]) -> float:
    """Return the base of the rotation; scalings for long contexts are the target's own, and not taken over."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping):
        nested = [part for part in parameters.values() if isinstance(part, Mapping)]
        for part in (parameters, *nested):
            theta = _optional(part, "rope_theta")
            if theta is not None:
                return theta
    return _optional(config, "rope_theta") or _DEFAULT_ROPE_THETA


def _optional(config: Mapping[str, JsonValue], *names: str) -> float | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
    return None


def _whole(config: Mapping[str, JsonValue], *names: str) -> int:
    value = _optional(config, *names)
    if value is None or value != int(value):
        raise ValueError(f"the target's configuration has no whole number {names[0]}: the draft's sizes follow from it")
    return int(value)
