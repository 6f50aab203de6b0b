"""The draft: projection, backbone, Markov and confidence heads, between the target's frozen embedding and head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark_store.draft.anchors import Blocks, Packing
from dspark_store.draft.backbone import DENSE_SLOTS, Backbone, Mask, Projection, dense_mask, flex_mask
from dspark_store.draft.heads import ConfidenceHead, markov_head
from dspark_store.draft.settings import DraftSettings

_INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """What a draft makes of the slots, from which their logits follow.

    ``hidden`` (B, N, K, H), the ``latents`` (B, N, K, r) of the Markov head and the logits (B, N, K) of the
    ``confidence``, each where the draft has that head.
    """

    hidden: Tensor
    latents: Tensor | None
    confidence: Tensor | None


class Draft(nn.Module):
    """Proposes a block of K tokens after each anchor from the target's states before it.

    ``embed`` and ``head`` (V, H), and ``bias`` (V,) where the target's head has one, are the target's and stay frozen;
    they are no part of the checkpoint, which a store's own copy completes, and stay one tensor where they are given as
    one. Everything else is initialised from torch's global generator. ValueError when the tables do not fit.
    """

    embed: Tensor
    untied_head: Tensor | None
    bias: Tensor | None

    def __init__(self, settings: DraftSettings, embed: Tensor, head: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        expected = (settings.vocab_size, settings.hidden_size)
        for name, table in (("embedding", embed), ("head", head)):
            if tuple(table.shape) != expected:
                raise ValueError(f"the target's {name} has shape {tuple(table.shape)}, the draft expects {expected}")
        if (bias is not None) != settings.head_bias:
            raise ValueError(
                f"head_bias is {settings.head_bias}, and the target's head bias was given: {bias is not None}"
            )
        self.settings = settings
        self.projection = Projection(settings)
        self.backbone = Backbone(settings)
        self.markov = markov_head(settings)
        self.confidence = ConfidenceHead(settings) if settings.confidence else None
        self.apply(_initialise)
        untied = None if head is embed else head
        for name, table_or_none in (("embed", embed), ("untied_head", untied), ("bias", bias)):
            self.register_buffer(name, table_or_none, persistent=False)

    @property
    def head(self) -> Tensor:
        """The target's head (V, H): its embedding where they are tied."""
        return self.embed if self.untied_head is None else self.untied_head

    def trainable(self) -> Iterator[nn.Parameter]:
        """Yield what is trained: all but the target's tables, which are no parameters."""
        return self.parameters()

    def forward(self, states: Tensor, blocks: Blocks, packing: Packing | None = None) -> DraftOutput:
        """Return what the draft makes of the states (B, S, L * H) of the captured layers, in the draft's dtype.

        Flex attention is used on CUDA, SDPA under a dense mask elsewhere and for few slots.
        """
        hidden = self.hidden(states, blocks, packing)
        latents: Tensor | None = None
        row: Tensor | None = None
        if self.markov is not None:
            latents = self.markov(blocks.previous, hidden)
            row = self.markov.table(blocks.previous) if self.settings.confidence_sees_markov else None
        return DraftOutput(hidden, latents, None if self.confidence is None else self.confidence(hidden, row))

    def slot_logits(self, hidden: Tensor, latents: Tensor | None = None) -> Tensor:
        """Return the logits (..., V) of slots, of their hidden states (..., H) and Markov latents (..., r)."""
        logits = self.head_logits(hidden)
        return logits if latents is None or self.markov is None else logits + self.markov.to_vocab(latents)

    def hidden(self, states: Tensor, blocks: Blocks, packing: Packing | None = None) -> Tensor:
        """Return the hidden states (B, N, K, H) of the slots."""
        anchors, size, width = blocks.anchors, blocks.block_size, states.shape[1]
        documents = None if packing is None else packing.documents
        many = blocks.labels[0].numel() > DENSE_SLOTS
        build = flex_mask if states.is_cuda and many else dense_mask
        mask: Mask = build(anchors, size, width, documents)
        first = torch.where(anchors.kept, blocks.previous[:, :, 0], self.settings.mask_token_id)
        slots = torch.full_like(blocks.labels, self.settings.mask_token_id)
        slots[:, :, 0] = first
        features = self.embedded(slots.flatten(1))
        positions = _positions(blocks, width, packing)
        hidden: Tensor = self.backbone(features, self.projection(states), positions, mask)
        return hidden.view(*blocks.labels.shape, -1)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the target's embedding (..., H) of ids (...), scaled as the target scales it."""
        embedded = F.embedding(ids, self.embed).to(self.projection.linear.weight.dtype)
        scale = self.settings.embedding_scale
        return embedded if scale is None else embedded * scale

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return what the target's head makes of hidden states (..., H): logits (..., V), scaled and capped."""
        settings = self.settings
        return head_logits(hidden, self.head, self.bias, settings.logit_scale, settings.final_logit_softcapping)

    def teacher_states(self, last: Tensor, blocks: Blocks) -> Tensor:
        """Return the target's own states (B, N, K, H) before the labels, of its last hidden states (B, S, H)."""
        sources = blocks.sources.flatten(1)[:, :, None].expand(-1, -1, last.shape[2])
        return torch.gather(last, 1, sources).view(*blocks.sources.shape, -1)


def head_logits(hidden: Tensor, head: Tensor, bias: Tensor | None, scale: float | None, cap: float | None) -> Tensor:
    """Return logits (..., V) of hidden states (..., H) by a head (V, H) and its bias (V,), then scaled and capped."""
    logits = F.linear(hidden, head, bias)
    if scale is not None:
        logits = logits * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _positions(blocks: Blocks, width: int, packing: Packing | None) -> Tensor:
    """Return the positions (B, S + N * K) of the context and of the slots."""
    anchors = blocks.anchors.positions
    slots = torch.arange(blocks.block_size, device=anchors.device)
    if packing is None:
        context = torch.arange(width, device=anchors.device).expand(anchors.shape[0], -1)
        starts = anchors
    else:
        context = packing.position_ids
        starts = torch.gather(context, 1, anchors)
    return torch.cat([context, (starts[:, :, None] + slots).flatten(1)], dim=1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear) and cast("Tensor | None", module.bias) is not None:
        nn.init.zeros_(module.bias)
