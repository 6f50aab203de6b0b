"""The parallel backbone: all slots of all blocks at once, over one context that no layer changes.

Slots attend to the context before their anchor and to their own block, by SDPA under a dense mask or by flex attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.settings import DraftSettings

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class RmsNorm(nn.Module):
    """Scales the last axis to a root mean square of one, then by a learned weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.width = width
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, features: Tensor) -> Tensor:
        """Return features (..., width) of the same dtype."""
        normed = F.rms_norm(features.float(), (self.width,), eps=self.epsilon)
        return (normed * self.weight.float()).to(features.dtype)


DENSE_SLOTS = 128
"""Up to so many slots per row, one of flex attention's blocks, a dense mask is small and nothing is compiled."""


def dense_mask(anchors: Anchors, block_size: int, context: int, documents: Tensor | None = None) -> Tensor:
    """Return (B, 1, N * K, S + N * K) bool: whether a slot sees a context position or another slot.

    A block sees the context at positions below its anchor, in the same one of ``documents`` (B, S) where rows are
    packed, and all of its own slots. A block that is not kept sees itself only, so that no row is empty.
    """
    device = anchors.positions.device
    positions = torch.arange(context, device=device)
    before = (positions < anchors.positions[:, :, None]) & anchors.kept[:, :, None]
    if documents is not None:
        before &= documents[:, None] == torch.gather(documents, 1, anchors.positions)[:, :, None]
    rows, blocks = anchors.positions.shape
    own = torch.eye(blocks, dtype=torch.bool, device=device).repeat_interleave(block_size, dim=1)
    sees = torch.cat([before, own.expand(rows, -1, -1)], dim=2)
    return sees.repeat_interleave(block_size, dim=1)[:, None]


def flex_mask(anchors: Anchors, block_size: int, context: int, documents: Tensor | None = None) -> BlockMask:
    """Return the mask of `dense_mask` for flex attention, which never makes it whole; nor does this on CUDA."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, blocks = anchors.positions.shape
    device = anchors.positions.device
    document_of = None if documents is None else torch.gather(documents, 1, anchors.positions)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        place = key.clamp(max=context - 1)
        before = (key < context) & (key < anchors.positions[row, block]) & anchors.kept[row, block]
        if documents is not None and document_of is not None:
            before &= documents[row, place] == document_of[row, block]
        return before | ((key >= context) & ((key - context) // block_size == block))

    slots = blocks * block_size
    create = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    return create(sees, rows, None, slots, context + slots, device=device)


@cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Uncompiled it makes the mask whole first, a byte for each slot and position; once, for batches of all lengths."""
    from torch.nn.attention.flex_attention import create_block_mask

    return cast("Callable[..., BlockMask]", torch.compile(create_block_mask, dynamic=True))


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (B, 1, P, head_dim) fp32 for positions (B, P).

    They are fp32 whatever the model was cast to: bf16 cannot tell neighbouring positions apart.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-powers
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (B, heads, P, head_dim) in the dtype of the angles; return them in their own.

    Queries and keys are then of the values' dtype, as flex attention asks and as SDPA is fastest.
    """
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)


type Mask = Tensor | BlockMask


class Attention(nn.Module):
    """Queries from the slots only; keys and values from context and slots, by the same projections."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        width, self.head_dim = settings.hidden_size, settings.head_dim
        self.query = nn.Linear(width, settings.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(width, settings.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(width, settings.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(settings.num_heads * self.head_dim, width, bias=False)
        self.query_norm = RmsNorm(self.head_dim, settings.rms_norm_eps)
        self.key_norm = RmsNorm(self.head_dim, settings.rms_norm_eps)

    def forward(self, slots: Tensor, context: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Return (B, N * K, H) for slots (B, N * K, H) and context (B, S, H), rotated by the angles of S + N * K."""
        seen = torch.cat([context, slots], dim=1)
        count = slots.shape[1]
        cos, sin = rotation
        query = rotate(self.query_norm(self._heads(self.query(slots))), cos[:, :, -count:], sin[:, :, -count:])
        key = rotate(self.key_norm(self._heads(self.key(seen))), cos, sin)
        mixed = attend(query, key, self._heads(self.value(seen)), mask)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, features: Tensor) -> Tensor:
        rows, positions, _ = features.shape
        return features.view(rows, positions, -1, self.head_dim).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Return (B, heads, Q, D); the queries' heads are a multiple of those of ``key`` and ``value``."""
    grouped = query.shape[1] != key.shape[1]
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    return _compiled_flex_attention()(query, key, value, block_mask=mask, enable_gqa=grouped)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Flex attention has no backward worth its name unless it is compiled; once, for batches of all lengths."""
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Callable[..., Tensor]", torch.compile(flex_attention, dynamic=True))


class Projection(nn.Module):
    """From the captured layers, concatenated, to the context: a linear map and a norm."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        self.linear = nn.Linear(settings.captured_layers * settings.hidden_size, settings.hidden_size, bias=False)
        self.norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        """Return (B, S, H) for states (B, S, L * H)."""
        return cast(Tensor, self.norm(self.linear(states)))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        self.gate = nn.Linear(settings.hidden_size, settings.intermediate_size, bias=False)
        self.up = nn.Linear(settings.hidden_size, settings.intermediate_size, bias=False)
        self.down = nn.Linear(settings.intermediate_size, settings.hidden_size, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape."""
        return cast(Tensor, self.down(F.silu(self.gate(features)) * self.up(features)))


class Layer(nn.Module):
    """Attention, then the MLP, each on normed slots and added to them."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        self.attention = Attention(settings)
        self.mlp_norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)
        self.mlp = GatedMlp(settings)

    def forward(self, slots: Tensor, context: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Return the slots, (B, N * K, H), after this layer."""
        slots = slots + self.attention(self.attention_norm(slots), context, rotation, mask)
        return cast(Tensor, slots + self.mlp(self.mlp_norm(slots)))


class Backbone(nn.Module):
    """Layers over slots and context, and a final norm."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        self.settings = settings
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings.num_layers))
        self.norm = RmsNorm(settings.hidden_size, settings.rms_norm_eps)

    def forward(self, slots: Tensor, context: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Return hidden states (B, N * K, H) of the slots.

        ``positions`` (B, S + N * K) are those of the context, then those of the slots.
        """
        rotation = rotary_angles(positions, self.settings.head_dim, self.settings.rope_theta)
        for layer in self.layers:
            slots = layer(slots, context, rotation, mask)
        return cast(Tensor, self.norm(slots))
