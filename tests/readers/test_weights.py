"""The target's tables come back in the cache dtype."""

from pathlib import Path

import pytest
import torch

from dspark_store import DamagedStoreError, open_cache, read_weights, verify_store
from dspark_store.format import schema
from dspark_store.format.metadata import write_metadata
from dspark_store.writers.weights import write_weights
from tests.stores import Shape, build_store, flip, numbers, same_bits

EMBED_OBJECT, HEAD_OBJECT = "target/embed_tokens/weight/c.0.0", "target/lm_head/weight/c.0.0"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("codec", ["none", "default", "dense"])
def test_embedding_and_head_come_back(dtype: str, codec: str, tmp_path: Path) -> None:
    store = build_store(tmp_path, dtype=dtype, codec=codec, lengths=(2,))
    weights = read_weights(store.storage, store.record)
    assert same_bits(weights.embed, store.embed)
    assert same_bits(weights.head, store.head)
    assert weights.bias is None
    assert same_bits(open_cache(tmp_path).weights().head, store.head)


def test_a_cache_knows_the_facts_of_the_targets_head(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(2,), weights=False, fields={"head": {"logit_scale": 0.5}})
    assert open_cache(tmp_path).head == {"logit_scale": 0.5}


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_several_chunks_come_back(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_WEIGHT_CHUNK_BYTES", 5 * 8 * 2)
    store = build_store(tmp_path, shape=Shape(vocab=19), lengths=(2,), tied=tied)
    weights = read_weights(store.storage, store.record)
    assert store.storage.list("target/lm_head/weight") == ["c.0.0", "c.1.0", "c.2.0", "c.3.0", "zarr.json"]
    assert same_bits(weights.embed, store.embed)
    assert same_bits(weights.head, store.head)


def test_a_tied_head_shares_the_embeddings_bytes(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=(2,), tied=True)
    assert (tmp_path / EMBED_OBJECT).stat().st_ino == (tmp_path / HEAD_OBJECT).stat().st_ino
    weights = read_weights(store.storage, store.record)
    assert same_bits(weights.embed, weights.head)


def test_a_head_of_its_own_is_stored(tmp_path: Path) -> None:
    build_store(tmp_path, lengths=(2,))
    assert (tmp_path / EMBED_OBJECT).read_bytes() != (tmp_path / HEAD_OBJECT).read_bytes()


def test_a_bias_comes_back_where_there_is_one(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=(2,), weights=False, without_shards={0})
    bias = numbers(3, (19,)).to(torch.bfloat16)
    record = write_weights(store.storage, store.record, store.embed, store.head, bias, tied=False)
    write_metadata(store.storage, record)
    read = read_weights(store.storage, open_cache(tmp_path, allow_incomplete=True).record).bias
    assert read is not None
    assert same_bits(read, bias)


def test_a_store_without_weights_says_so(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=(2,), weights=False)
    with pytest.raises(FileNotFoundError, match=r"target/embed_tokens/weight not found in .* without target weights"):
        read_weights(store.storage, store.record)
    assert verify_store(open_cache(tmp_path)) == []


def test_altered_weights_are_named(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=(2,))
    flip(tmp_path / HEAD_OBJECT, 50)
    with pytest.raises(DamagedStoreError, match=r"target weights target/lm_head/weight of .* are not the ones"):
        read_weights(store.storage, store.record)
    (problem,) = verify_store(open_cache(tmp_path))
    assert problem.key.startswith("target/lm_head/weight/")


def test_swapped_tables_are_found(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=(2,))
    (tmp_path / HEAD_OBJECT).write_bytes((tmp_path / EMBED_OBJECT).read_bytes())
    with pytest.raises(DamagedStoreError, match="target/lm_head/weight"):
        read_weights(store.storage, store.record)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    store = build_store(tmp_path, lengths=(2,))
    (tmp_path / EMBED_OBJECT).unlink()
    with pytest.raises(DamagedStoreError, match=f"object {EMBED_OBJECT} is missing"):
        read_weights(store.storage, store.record)
