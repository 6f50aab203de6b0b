"""A draft learns from a store exactly as from the live target: every loss and every gradient, bit by bit."""

import pytest

from tests.precompute.jobs import precompute
from tests.training.runs import metrics, traced, write_online

FIFTY = ("--max-steps", 50, "--epochs", 10, "--validation-fraction", 0.1, "--gamma", 4)


def both(llama, chats, store, directory, *more, **changes):
    file = write_online(directory / "job.yaml", llama, chats, **changes)
    stored = traced(directory / "stored", "--store", store, *FIFTY, *more)
    live = traced(directory / "live", "--online", file, *FIFTY, *more)
    return stored, live


def assert_equal(stored, live, steps=50):
    assert len(stored[1]) == len(set(stored[1])) == steps
    assert stored[1] == live[1]
    assert metrics(stored[0]) == metrics(live[0])
    assert metrics(stored[0], "validation") == metrics(live[0], "validation")
    assert len(metrics(stored[0], "validation")) == 1


def test_fifty_steps_from_an_fp32_store_are_those_of_online_training(llama, chats, store, tmp_path):
    stored, live = both(llama, chats, store, tmp_path)
    assert_equal(stored, live)


@pytest.mark.parametrize("markov", ["gated", "rnn"])
def test_so_it_is_with_every_markov_head_in_rows_of_full_length(llama, chats, store, tmp_path, markov):
    stored, live = both(llama, chats, store, tmp_path, "--markov", markov, "--shape", "full")
    assert_equal(stored, live)


def test_from_a_bf16_store_they_are_those_of_online_states_that_were_cast(llama, chats, tmp_path):
    store = precompute(llama, chats, tmp_path / "store", "--dtype", "bf16")
    stored, live = both(llama, chats, store, tmp_path, dtype="bf16")
    assert_equal(stored, live)


def test_a_draft_of_some_of_the_layers_learns_the_same_too(llama, chats, store, tmp_path):
    stored, live = both(llama, chats, store, tmp_path, "--layers", 3, 1, "--accumulate", 2, "--max-steps", 12)
    assert_equal(stored, live, steps=12)


def test_fp32_and_bf16_stores_do_differ(llama, chats, store, tmp_path):
    rounded = precompute(llama, chats, tmp_path / "store", "--dtype", "bf16")
    few = ("--max-steps", 2)
    assert traced(tmp_path / "a", "--store", store, *few)[1] != traced(tmp_path / "b", "--store", rounded, *few)[1]
