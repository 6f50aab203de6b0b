"""The case worked out by hand: two words, one block, draft probabilities 3/4 and 1/4, the teacher's the other way."""

import torch

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.blocks import Blocks
from dspark_store.draft.model import DraftOutput

TEACHER = torch.tensor([0.25, 0.75]).log().expand(1, 1, 3, 2)


def hand_output(confidence=(0.0, 0.0, 0.0), *, draft=(0.75, 0.25)):
    logits = torch.tensor(draft).log().expand(1, 1, 3, 2)
    return DraftOutput(logits, None if confidence is None else torch.tensor([[list(confidence)]]))


def hand_blocks(*supervised):
    """A block whose labels are all 0."""
    zeros = torch.zeros(1, 1, 3, dtype=torch.long)
    anchors = Anchors(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))
    return Blocks(anchors, zeros, zeros, zeros, torch.tensor([[list(supervised)]]).bool())
