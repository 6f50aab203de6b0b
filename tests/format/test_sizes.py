"""What samples amount to before compression, in three ways of keeping them."""

from dspark_store.format.dtypes import cache_dtype
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.format.sizes import (
    Volume,
    distinct_states,
    padded_bytes,
    ragged_bytes,
    ragged_once_bytes,
    ragged_rows_bytes,
    weight_bytes,
)


def schema_of(layer_ids=(1, 2, 3)):
    return StoreSchema(0, 4, 100, 32, len(layer_ids), layer_ids, cache_dtype("bf16"), "default", 64)


def test_a_volume_counts_tokens_and_samples_without_supervision():
    volume = Volume.of(schema_of(), [5, 70, 3], [2, 0, 3])
    expected = Volume(samples=3, tokens=78, chunk_tokens=4 * 64, supervised=5, unsupervised_samples=1)
    assert volume == expected


def test_a_captured_last_layer_is_the_last_hidden_state_and_counts_once():
    assert distinct_states(schema_of((1, 2, 3)), last_layer=3) == 3
    assert distinct_states(schema_of((0, 1, 2)), last_layer=3) == 4


def test_bytes_of_a_token_follow_from_its_vectors():
    schema = schema_of((1, 2, 3))
    assert ragged_bytes(schema, 3, tokens=10) == 10 * 3 * 32 * 2
    assert ragged_once_bytes(schema, 3, tokens=10) == 10 * (3 * 32 * 2 + 5)
    assert ragged_rows_bytes(schema, tokens=10) == 10 * (4 * 32 * 2 + 5)
    assert padded_bytes(schema, samples=2) == 2 * 100 * (4 * 32 * 2 + 16)


def test_the_tables_of_an_untied_target_are_two():
    def record(tied):
        manifest = {"target_vocab_size": 50}
        return StoreRecord("", schema_of(), manifest=manifest, target_config={"tie_word_embeddings": tied})

    assert weight_bytes(record(tied=True)) == 50 * 32 * 2
    assert weight_bytes(record(tied=False)) == 2 * 50 * 32 * 2
