from dataclasses import replace

import pytest

from dspark_store.draft.settings import DraftSettings
from dspark_store.target.facts import target_config_json
from tests.draft.drafts import SETTINGS
from tests.tiny import tiny_gemma, tiny_gpt2, tiny_llama, tiny_qwen3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 0}, "block_size of a draft must be >= 1, got 0"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"mask_token_id": 37}, "mask_token_id 37 is outside the vocabulary of 37"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"markov": "lstm"}, "markov must be one of vanilla, gated, rnn, none, got 'lstm'"),
    ],
)
def test_a_size_that_cannot_be_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        replace(SETTINGS, **change)


def sizes_of(target):
    return DraftSettings.of_target(target_config_json(target.config), captured_layers=1, mask_token_id=0)


def test_a_draft_takes_its_sizes_from_the_targets_configuration():
    shape = sizes_of(tiny_qwen3(rope_theta=5000.0))
    assert (shape.vocab_size, shape.hidden_size, shape.intermediate_size) == (288, 32, 64)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)
    assert shape.rope_theta == 5000.0


def test_a_target_without_a_head_dimension_splits_its_width():
    assert sizes_of(tiny_llama()).head_dim == 8


def test_a_target_of_other_names_is_understood():
    shape = sizes_of(tiny_gpt2())
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.intermediate_size) == (32, 4, 4, 128)


def test_a_rotation_that_differs_by_kind_of_layer_is_found():
    assert sizes_of(tiny_gemma()).rope_theta >= 10000.0


def test_a_configuration_without_a_width_is_refused():
    with pytest.raises(ValueError, match="no whole number hidden_size"):
        DraftSettings.of_target({"vocab_size": 3}, 1, 0)


def test_the_confidence_head_sees_no_markov_row_where_there_is_none():
    assert SETTINGS.confidence_sees_markov
    assert not replace(SETTINGS, markov="none").confidence_sees_markov
    assert not replace(SETTINGS, confidence_with_markov=False).confidence_sees_markov
