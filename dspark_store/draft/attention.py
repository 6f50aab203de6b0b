"""Attention of block slots to context and block, by SDPA under a dense mask or by flex attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_store.draft.norm import RmsNorm
from dspark_store.draft.rotary import rotate
from dspark_store.draft.settings import DraftSettings

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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
