"""The draft at work: a block of tokens from the target's states so far and the token that it gave last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.blocks import Blocks
from dspark_store.draft.model import Draft


def propose(draft: Draft, states: Tensor, token: int) -> list[int]:
    """Return the K likeliest tokens after ``token``, each given the one before it.

    ``states`` (1, S, L * H) are those of the S tokens before ``token``, in the draft's dtype.
    """
    size, device = draft.settings.block_size, states.device
    with torch.inference_mode():
        hidden = draft.hidden(states, _one_block(states.shape[1], token, size, device))[0, 0]
        logits = draft.head_logits(hidden)
        tokens: list[int] = []
        state: Tensor | None = None
        for slot in range(size):
            scores = logits[slot]
            if draft.markov is not None:
                previous = torch.tensor(tokens[-1] if tokens else token, device=device)
                bias, state = draft.markov.step(previous, hidden[slot], state)
                scores = scores + bias
            tokens.append(int(scores.argmax()))
    return tokens


def _one_block(position: int, token: int, size: int, device: torch.device) -> Blocks:
    """Return one block at a position, of which nothing but its first token is known."""
    anchors = Anchors(torch.tensor([[position]], device=device), torch.ones((1, 1), dtype=torch.bool, device=device))
    unknown = torch.zeros((1, 1, size), dtype=torch.int64, device=device)
    previous = unknown.clone()
    previous[0, 0, 0] = token
    return Blocks(anchors, unknown, previous, unknown, unknown.bool())


def accepted(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many proposed tokens stand before the first that the target would not have chosen."""
    count = 0
    for one, other in zip(proposed, chosen, strict=False):
        if one != other:
            break
        count += 1
    return count
