import pytest
import torch

from dspark_store.draft.anchors import Anchors
from dspark_store.draft.blocks import blocks_at
from dspark_store.evaluation.proposer import accepted, propose
from tests.draft.drafts import LAYERS, MARKOV_KINDS, VOCAB, WIDTH, random_, tiny_draft


@pytest.mark.parametrize(
    ("proposed", "chosen", "count"),
    [([1, 2, 3], [1, 2, 3, 4], 3), ([1, 9, 3], [1, 2, 3, 4], 1), ([9, 2], [1, 2, 3], 0), ([], [1], 0)],
)
def test_tokens_are_accepted_up_to_the_first_that_the_target_would_not_choose(proposed, chosen, count):
    assert accepted(proposed, chosen) == count


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_each_proposed_token_is_the_likeliest_that_training_would_give_after_the_ones_before(kind):
    """A text that goes on with the proposal itself, taught as in training, has each of its tokens for the likeliest."""
    draft = tiny_draft(markov=kind).requires_grad_(False)
    states = torch.randn(1, 9, LAYERS * WIDTH, generator=random_(5))
    proposed = propose(draft, states, 7)
    assert len(proposed) == 4
    ids = torch.cat([torch.randint(VOCAB, (9,), generator=random_()), torch.tensor([7, *proposed])])[None]
    anchors = Anchors(torch.tensor([[9]]), torch.tensor([[True]]))
    wide = torch.cat([states, torch.randn(1, 5, LAYERS * WIDTH)], dim=1)
    output = draft(wide, blocks_at(anchors, ids, torch.ones_like(ids), 4))
    assert output.logits[0, 0].argmax(-1).tolist() == proposed
