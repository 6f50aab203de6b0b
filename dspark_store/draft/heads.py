"""The heads on the backbone: Markov and confidence.

A Markov head is a low-rank bias on a slot's logits from the token before, which the parallel backbone cannot see: it
makes a latent (..., r) for each slot, and one map takes it to the vocabulary. In training the previous tokens are known
and all slots are done at once; in decoding `step` does one slot after the other.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from dspark_store.draft.settings import DraftSettings


class MarkovHead(nn.Module):
    """The vanilla head: the latent is the previous token's own row of a table (V, r)."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        self.rank = settings.markov_rank
        self.table = nn.Embedding(settings.vocab_size, self.rank)
        self.to_vocab = nn.Linear(self.rank, settings.vocab_size, bias=False)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Return the latents (..., K, r) of whole blocks, of previous tokens (..., K) and hidden states (..., K, H)."""
        return cast(Tensor, self.table(previous))

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the bias (..., V) of the next slot, and the state to hand in for the one after; None begins a block.

        ``previous`` is (...), ``hidden`` (..., H).
        """
        return self.to_vocab(self(previous, hidden)), state


class GatedMarkovHead(MarkovHead):
    """The row of the previous token, gated by it and by the slot's hidden state."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self.gate = nn.Linear(settings.hidden_size + self.rank, self.rank)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """See `MarkovHead`."""
        row = self.table(previous)
        return cast(Tensor, torch.sigmoid(self.gate(torch.cat([hidden, row], dim=-1))) * row)


class RecurrentMarkovHead(MarkovHead):
    """A small gated recurrence along the block, which begins at zero."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self.cell = nn.Linear(2 * self.rank + settings.hidden_size, 3 * self.rank)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """See `MarkovHead`."""
        state: Tensor | None = None
        latents = []
        for slot in range(previous.shape[-1]):
            latent, state = self._advance(previous[..., slot], hidden[..., slot, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead`."""
        latent, state = self._advance(previous, hidden, state)
        return self.to_vocab(latent), state

    def _advance(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        row = self.table(previous)
        state = torch.zeros_like(row) if state is None else state
        gate, candidate, out = self.cell(torch.cat([state, row, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


def markov_head(settings: DraftSettings) -> MarkovHead | None:
    """Return the head of the settings' kind, None for "none"."""
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return None if settings.markov == "none" else kinds[settings.markov](settings)


class ConfidenceHead(nn.Module):
    """One logit per slot, from its hidden state and, where there is a Markov head, the previous token's row in it."""

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        width = settings.hidden_size + (settings.markov_rank if settings.confidence_sees_markov else 0)
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, row: Tensor | None) -> Tensor:
        """Return (...) for hidden states (..., H) and rows (..., r), None where the head is not shown any."""
        features = hidden if row is None else torch.cat([hidden, row], dim=-1)
        return cast(Tensor, self.linear(features).squeeze(-1))
