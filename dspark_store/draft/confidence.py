"""The confidence head: how likely the target is to accept a slot's token."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from dspark_store.draft.settings import DraftSettings


class ConfidenceHead(nn.Module):
    """One logit a slot, from its hidden state and, where there is a Markov head, the previous token's row in it."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        width = settings.hidden_size + (settings.markov_rank if settings.confidence_sees_markov else 0)
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, row: Tensor | None) -> Tensor:
        """Return (...) for hidden states (..., H) and rows (..., r), None where the head is not shown any."""
        features = hidden if row is None else torch.cat([hidden, row], dim=-1)
        return cast(Tensor, self.linear(features).squeeze(-1))
