import pytest
import torch

from dspark_store.draft.anchors import Anchors, blocks_at
from dspark_store.evaluation.proposer import propose
from dspark_store.evaluation.sampling import Sampler
from tests.draft.drafts import LAYERS, MARKOV_KINDS, VOCAB, WIDTH, all_logits, random_, tiny_draft


@pytest.mark.parametrize("kind", MARKOV_KINDS)
def test_each_proposed_token_is_the_likeliest_that_training_would_give_after_the_ones_before(kind):
    """A text that goes on with the proposal itself, taught as in training, has each of its tokens for the likeliest."""
    draft = tiny_draft(markov=kind).requires_grad_(False)
    states = torch.randn(1, 9, LAYERS * WIDTH, generator=random_(5))
    proposed = propose(draft, states, 7, Sampler()).tokens
    assert len(proposed) == 4
    ids = torch.cat([torch.randint(VOCAB, (9,), generator=random_()), torch.tensor([7, *proposed])])[None]
    anchors = Anchors(torch.tensor([[9]]), torch.tensor([[True]]))
    wide = torch.cat([states, torch.randn(1, 5, LAYERS * WIDTH)], dim=1)
    output = draft(wide, blocks_at(anchors, ids, torch.ones_like(ids), 4))
    assert all_logits(draft, output)[0, 0].argmax(-1).tolist() == proposed


def test_drawn_tokens_come_with_the_probabilities_that_training_would_give_them():
    draft = tiny_draft(markov="vanilla").requires_grad_(False)
    states = torch.randn(1, 9, LAYERS * WIDTH, generator=random_(5))
    proposal = propose(draft, states, 7, Sampler(0.5, seed=3))
    ids = torch.cat([torch.zeros(9, dtype=torch.int64), torch.tensor([7, *proposal.tokens])])[None]
    anchors = Anchors(torch.tensor([[9]]), torch.tensor([[True]]))
    wide = torch.cat([states, torch.zeros(1, 5, LAYERS * WIDTH)], dim=1)
    logits = all_logits(draft, draft(wide, blocks_at(anchors, ids, torch.ones_like(ids), 4)))[0, 0]
    assert torch.allclose(proposal.probabilities, (logits / 0.5).softmax(-1), atol=1e-6)
    assert proposal.tokens == propose(draft, states, 7, Sampler(0.5, seed=3)).tokens
    assert proposal.tokens != propose(draft, states, 7, Sampler(0.5, seed=4)).tokens
