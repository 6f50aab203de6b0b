"""The parallel backbone: all slots of all blocks at once, over one context that no layer changes."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from dspark_store.draft.attention import Attention, Mask
from dspark_store.draft.norm import RmsNorm
from dspark_store.draft.rotary import rotary_angles
from dspark_store.draft.settings import DraftSettings


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
