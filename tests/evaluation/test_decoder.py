import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from dspark_store.draft.anchors import Anchors, blocks_at
from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings
from dspark_store.evaluation import decoder as decoder_module
from dspark_store.evaluation.decoder import Decoder, propose
from dspark_store.evaluation.sampling import Proposal, Sampler
from dspark_store.target.facts import head_facts, target_weights
from tests.draft.drafts import LAYERS, MARKOV_KINDS, VOCAB, WIDTH, all_logits, random_, tiny_draft
from tests.tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_gemma, tiny_llama, tiny_qwen3, tiny_qwen3_moe


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


PROMPTS = [[5, 40, 41, 42, 9], [100] * 20, [7]]
LAYER_IDS = (3, 1)


def loud(model):
    """Make the target sure of its tokens: even logits are near ties everywhere."""
    model.get_output_embeddings().weight.data *= 60
    return model


def draft_of(model, **changes):
    embed, head, bias = target_weights(model)
    facts: Any = head_facts(model)
    settings = DraftSettings(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        captured_layers=len(LAYER_IDS),
        mask_token_id=3,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=32,
        block_size=3,
        markov_rank=4,
        final_logit_softcapping=facts["final_logit_softcapping"],
        embedding_scale=facts["embedding_scale"],
    )
    torch.manual_seed(0)
    return Draft(dataclasses.replace(settings, **changes), embed, head, bias).eval()


@pytest.mark.parametrize(
    ("build", "prompt"),
    [(tiny_llama, PROMPTS[0]), (tiny_qwen3, PROMPTS[1]), (tiny_qwen3_moe, PROMPTS[2]), (tiny_gemma, PROMPTS[0])],
)
def test_the_text_is_the_targets_own_whatever_the_draft_proposes(build, prompt):
    model = loud(build())
    decoder = Decoder(model, LAYER_IDS)
    own = decoder.greedy(prompt, 25)
    speculated = decoder.speculate(draft_of(model), prompt, 25)
    assert speculated.tokens == own.tokens
    assert 25 / 4 - 1 <= speculated.steps <= 24
    assert min(own.margins) > 1e-4


def test_greedy_text_is_that_of_transformers_own_generation():
    model = loud(tiny_llama())
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        text = Decoder(model, LAYER_IDS).greedy(prompt, 12, frozenset({1})).tokens
        assert text == expected[0, len(prompt) :].tolist()


def three_of(own, draft, states, token, sampler):
    """Propose what the target itself says next."""
    tokens = own[states.shape[1] - len(PROMPTS[0]) + 1 :][:3]
    return Proposal(tokens, torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE).float())


def test_a_draft_that_knows_the_text_gives_a_whole_block_a_step(monkeypatch):
    """Proposals are taken from the target's own text: each step gives all of them and one more."""
    model = loud(tiny_llama())
    decoder = Decoder(model, LAYER_IDS)
    own = decoder.greedy(PROMPTS[0], 40).tokens
    monkeypatch.setattr(decoder_module, "propose", partial(three_of, own))
    speculated = decoder.speculate(draft_of(model), PROMPTS[0], 33)
    assert speculated.tokens == own[:33]
    assert speculated.steps == 8


def test_the_draft_is_shown_the_states_that_the_target_would_have_alone(monkeypatch):
    """After rejected proposals too, the context is that of a plain forward over the text so far."""
    model = loud(tiny_llama())
    decoder, seen = Decoder(model, LAYER_IDS), []
    real = propose

    def noted(draft, states, token, sampler):
        seen.append((states.clone(), token))
        return real(draft, states, token, sampler)

    monkeypatch.setattr(decoder_module, "propose", noted)
    prompt = PROMPTS[0]
    tokens = decoder.speculate(draft_of(model), prompt, 12).tokens
    text = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1] for layer in LAYER_IDS], dim=2)
    for context, token in seen:
        length = context.shape[1]
        assert token == text[0, length]
        assert torch.allclose(context, expected[:, :length], atol=1e-4)


def test_decoding_ends_with_a_stop_token_and_says_no_more():
    model = loud(tiny_llama())
    decoder = Decoder(model, LAYER_IDS)
    own = decoder.greedy(PROMPTS[0], 20).tokens
    stop = frozenset({own[6]})
    ended = decoder.greedy(PROMPTS[0], 20, stop).tokens
    assert ended == own[: own.index(own[6]) + 1]
    assert decoder.speculate(draft_of(model), PROMPTS[0], 20, stop).tokens == ended


def test_decoding_ends_with_a_stop_token_in_the_midst_of_what_a_step_accepts(monkeypatch):
    model = loud(tiny_llama())
    decoder = Decoder(model, LAYER_IDS)
    own = decoder.greedy(PROMPTS[0], 40).tokens
    monkeypatch.setattr(decoder_module, "propose", partial(three_of, own))
    place = next(place for place in range(1, 36) if place % 4 and own.index(own[place]) == place)
    assert decoder.speculate(draft_of(model), PROMPTS[0], 36, frozenset({own[place]})).tokens == own[: place + 1]


def test_of_a_prompt_only_the_last_logits_are_made(monkeypatch):
    """A vocabulary of logits for each token of a long prompt would be gigabytes."""
    model, rows = loud(tiny_llama()), []
    decoder = Decoder(model, LAYER_IDS)
    real = torch.nn.functional.linear

    def noted(features, weight, bias=None):
        if weight.shape == (VOCAB_SIZE, HIDDEN_SIZE):
            rows.append(features.shape[0])
        return real(features, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    decoder.greedy(PROMPTS[1], 3)
    assert rows == [1, 1, 1]


def test_at_a_temperature_tokens_are_drawn_as_the_target_alone_would_draw_them():
    """Two tokens, over many seeds, beside what the target gives; the vocabulary is counted in eight parts."""
    model, temperature, seeds = loud(tiny_llama()), 2.0, 400
    decoder, draft = Decoder(model, LAYER_IDS), draft_of(model)

    def drawn(seed):
        return decoder.speculate(draft, PROMPTS[0], 2, sampler=Sampler(temperature, seed)).tokens

    texts = torch.tensor([drawn(seed) for seed in range(seeds)])
    assert texts[7].tolist() == drawn(7)
    after = torch.tensor([[*PROMPTS[0], token] for token in range(VOCAB_SIZE)])
    with torch.no_grad():
        rows = (model(after).logits[:, -2:] / temperature).softmax(-1)
    first = rows[0, 0]
    for place, shares in enumerate((first, first @ rows[:, 1])):
        expected = shares.view(-1, 8).sum(0)
        found = torch.bincount(texts[:, place] % 8, minlength=8) / seeds
        assert expected.max() > 2 * expected.min()
        assert bool(((found - expected).abs() < 4 * (expected * (1 - expected) / seeds).sqrt()).all())
