"""What codecs make of states, as a store keeps them."""

from benchmarks.ratios import layer_bytes, main
from dspark_store import open_cache
from dspark_store.inspection.estimate.measurement import Variant
from tests.stores import build_store


def test_the_fill_behind_a_sample_counts_as_it_is_stored(tmp_path, capsys):
    store = build_store(tmp_path / "s", dtype="fp32", codec="none")
    cache = open_cache(store.path)
    schema = cache.schema
    chunks = sum(schema.states.chunks_of(int(length)) for length in cache.lengths)
    chunk = schema.chunk_tokens * schema.hidden_size * 4 + 4
    assert layer_bytes(cache, Variant("none", "fp32"), range(len(cache))) == [chunks * chunk] * schema.num_layers
    assert main([str(store.path)]) == 0
    assert f"of ragged bf16 rows of {schema.num_layers + 1} vectors" in capsys.readouterr().out
