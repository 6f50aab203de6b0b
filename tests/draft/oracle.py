"""The case worked out by hand: two words, one block, draft probabilities 3/4 and 1/4, the teacher's the other way."""

import torch

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.blocks import Blocks
from dspark_store.draft.distance import SlotTerms
from dspark_store.draft.loss import loss_sums

TEACHER = torch.tensor([0.25, 0.75]).log().expand(1, 1, 3, 2)
DRAFT = torch.tensor([0.75, 0.25]).log().expand(1, 1, 3, 2)
UNSURE = torch.zeros(1, 1, 3)


def hand_sums(blocks, gamma=None, *, logits=DRAFT, confidence=UNSURE):
    return loss_sums(SlotTerms.of_logits(logits, TEACHER, blocks), confidence, blocks, gamma)


def hand_blocks(*supervised):
    """A block whose labels are all 0."""
    zeros = torch.zeros(1, 1, 3, dtype=torch.long)
    anchors = Anchors(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))
    return Blocks(anchors, zeros, zeros, zeros, torch.tensor([[list(supervised)]]).bool())
