"""The token phase of a blend: every sample keeps its origin, through a crash too."""

from dataclasses import replace

import pytest

from dspark_store import open_cache
from dspark_store.format.metadata import read_record, write_metadata
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.tokenise import tokenise
from dspark_store.sources.parts import build_blend
from dspark_store.sources.registry import SourceContext, SpecValue
from dspark_store.writers.tokens import write_token_shard
from tests.writers.small_store import SEQ_LENGTH, small_record


@pytest.fixture(scope="module")
def blend():
    dummy: dict[str, SpecValue] = {"type": "dummy", "max_length": SEQ_LENGTH}
    parts: SpecValue = [{**dummy, "samples": samples, "seed": samples} for samples in (9, 4, 2)]
    return build_blend(SourceContext(seq_length=SEQ_LENGTH, vocab_size=40), sources=parts)


@pytest.fixture
def record(blend):
    return replace(small_record(), schema=replace(small_record().schema, sources=blend.origins()))


def test_the_store_says_where_each_sample_came_from_even_after_a_crash(tmp_path, monkeypatch, blend, record):
    storage = LocalStorage(tmp_path)
    write_metadata(storage, record)

    def fail_at_the_third(storage, record, shard, *args):
        if shard == 2:
            raise KeyboardInterrupt
        write_token_shard(storage, record, shard, *args)

    with monkeypatch.context() as patch:
        patch.setattr(tokenise_module, "write_token_shard", fail_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            tokenise(storage, record, blend)
    tokenise(storage, read_record(storage), blend)
    cache, samples = open_cache(tmp_path, allow_incomplete=True), list(blend.read())
    assert cache.source.tolist() == [sample.origin for sample in samples]
    assert cache.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    assert cache.sources == ("dummy", "dummy 2", "dummy 3")
