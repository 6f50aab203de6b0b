import logging
from typing import Any

import pytest
from transformers import GPTJConfig, KimiLinearConfig, LlamaConfig, OPTConfig

from dspark_store.target.limits import check_fits
from tests.tiny import tiny_gpt2

LLAMA = LlamaConfig(vocab_size=300, max_position_embeddings=512)
SMALL: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
TABLES = {
    "learned": tiny_gpt2(n_positions=512).config,
    "learned, with spare rows": OPTConfig(**SMALL, max_position_embeddings=512, ffn_dim=32, word_embed_proj_dim=32),
    "computed": GPTJConfig(vocab_size=300, n_positions=512, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
}


def warnings_of(caplog, config, seq_length, vocab_size=100):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dspark_store"):
        check_fits(config, seq_length, vocab_size)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("config", TABLES.values(), ids=TABLES.keys())
def test_more_positions_than_a_table_has_are_refused(config, caplog):
    assert warnings_of(caplog, config, 512) == []
    with pytest.raises(
        ValueError, match=r"seq-length 513 does not fit .* has 512 rows: pass --seq-length 512"
    ) as error:
        check_fits(config, 513, 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", [LLAMA, KimiLinearConfig(num_hidden_layers=2, max_position_embeddings=512)])
def test_positions_past_those_of_a_target_without_a_table_give_one_warning(config, caplog):
    assert warnings_of(caplog, config, 512) == []
    (warning,) = warnings_of(caplog, config, 513)
    assert f"513 is beyond the 512 positions that the {config.model_type} target" in warning


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_gives_a_warning_with_both(caplog):
    assert warnings_of(caplog, LLAMA, 10, 300) == []
    (warning,) = warnings_of(caplog, LLAMA, 10, 301)
    assert "ids up to 300" in warning
    assert "300 embedding rows" in warning
