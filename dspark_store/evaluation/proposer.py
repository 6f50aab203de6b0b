"""The draft at work: a block of tokens from the target's states so far and the token that it gave last."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_store.draft.anchors import Anchors, Blocks
from dspark_store.draft.model import Draft
from dspark_store.evaluation.sampling import Proposal, Sampler


def propose(draft: Draft, states: Tensor, token: int, sampler: Sampler) -> Proposal:
    """Return K tokens after ``token``, each drawn given the one before it.

    ``states`` (1, S, L * H) are those of the S tokens before ``token``, in the draft's dtype.
    """
    size, device = draft.settings.block_size, states.device
    with torch.inference_mode():
        hidden = draft.hidden(states, _one_block(states.shape[1], token, size, device))[0, 0]
        logits = draft.head_logits(hidden)
        tokens: list[int] = []
        rows: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(size):
            scores = logits[slot]
            if draft.markov is not None:
                previous = torch.tensor(tokens[-1] if tokens else token, device=device)
                bias, state = draft.markov.step(previous, hidden[slot], state)
                scores = scores + bias
            rows.append(sampler.probabilities(scores))
            tokens.append(sampler.draw(rows[-1]))
        return Proposal(tokens, torch.stack(rows))


def _one_block(position: int, token: int, size: int, device: torch.device) -> Blocks:
    """Return one block at a position, of which nothing but its first token is known."""
    anchors = Anchors(torch.tensor([[position]], device=device), torch.ones((1, 1), dtype=torch.bool, device=device))
    unknown = torch.zeros((1, 1, size), dtype=torch.int64, device=device)
    previous = unknown.clone()
    previous[0, 0, 0] = token
    return Blocks(anchors, unknown, previous, unknown, unknown.bool())
