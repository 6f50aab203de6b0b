import dataclasses

import pytest
import torch

from dspark_store.draft.heads import markov_head
from tests.draft.drafts import SETTINGS, VOCAB, WIDTH, random_


def made(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = markov_head(dataclasses.replace(SETTINGS, markov=kind))
    assert head is not None
    random = random_()
    return head, torch.randint(VOCAB, (2, 3, 4), generator=random), torch.randn(2, 3, 4, WIDTH, generator=random)


def biases(head, previous, hidden):
    return head.to_vocab(head(previous, hidden))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_step_by_step_gives_what_a_whole_block_gives(kind):
    head, previous, hidden = made(kind)
    whole, state = biases(head, previous, hidden), None
    assert whole.shape == (2, 3, 4, VOCAB)
    for slot in range(4):
        bias, state = head.step(previous[..., slot], hidden[..., slot, :], state)
        assert torch.allclose(bias, whole[..., slot, :], atol=1e-6)


def test_the_vanilla_bias_is_a_row_of_a_table_of_low_rank():
    head, previous, hidden = made("vanilla")
    table = head.table.weight @ head.to_vocab.weight.T
    assert torch.allclose(biases(head, previous, hidden), table[previous], atol=1e-6)


def test_the_gated_bias_by_hand():
    head, previous, hidden = made("gated")
    row = head.table.weight[previous[0, 0, 0]]
    gate = torch.sigmoid(head.gate(torch.cat([hidden[0, 0, 0], row])))
    assert torch.allclose(biases(head, previous, hidden)[0, 0, 0], (gate * row) @ head.to_vocab.weight.T, atol=1e-6)


def test_the_recurrent_bias_by_hand():
    head, previous, hidden = made("rnn")
    rows, state = head.table.weight[previous[0, 0]], torch.zeros(6)
    for slot in range(2):
        parts = head.cell.weight @ torch.cat([state, rows[slot], hidden[0, 0, slot]]) + head.cell.bias
        gate, candidate, out = torch.sigmoid(parts[:6]), torch.tanh(parts[6:12]), torch.tanh(parts[12:])
        assert torch.allclose(biases(head, previous, hidden)[0, 0, slot], head.to_vocab.weight @ out, atol=1e-6)
        state = gate * state + (1 - gate) * candidate


def test_the_recurrence_carries_what_came_before_and_begins_anew_in_each_block():
    head, previous, hidden = made("rnn")
    changed = previous.clone()
    changed[0, 0, 0] = (changed[0, 0, 0] + 1) % VOCAB
    differs = (biases(head, previous, hidden) != biases(head, changed, hidden)).any(-1)
    assert differs[0, 0].all()
    assert not differs[0, 1:].any()


def test_there_may_be_no_head():
    assert markov_head(dataclasses.replace(SETTINGS, markov="none")) is None
