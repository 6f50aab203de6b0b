"""One corpus as JSON Lines, gzip, parquet, a dataset and a Megatron pair: the same store, whatever it was read from."""

import gzip
import json

import pytest
import torch

from dspark_store import open_cache
from dspark_store.sources import ChatSource
from dspark_store.sources.megatron import write_samples
from tests.precompute.jobs import LENGTH, contents, precompute
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

DIGESTS_OF_OBJECTS = ("ledger/", "index/objects/")  # an object says which store it belongs to


@pytest.fixture(scope="module")
def long_samples(chats):
    """The samples of the corpus, uncut."""
    samples = list(ChatSource(chats, tiny_tokenizer(), seq_length=10_000).read())
    assert 0 < sum(len(sample.input_ids) > LENGTH for sample in samples) < len(samples)
    return samples


def rows_of(chats):
    return [json.loads(line) for line in chats.read_text().splitlines()]


def as_gzip(chats, samples, folder):
    (folder / "chats.jsonl.gz").write_bytes(gzip.compress(chats.read_bytes()))
    return folder / "chats.jsonl.gz"


def as_parquet(chats, samples, folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows_of(chats)), folder / "chats.parquet", row_group_size=4)
    return folder / "chats.parquet"


def as_dataset(chats, samples, folder):
    pytest.importorskip("datasets").Dataset.from_list(rows_of(chats)).save_to_disk(folder / "saved")
    return folder / "saved"


def as_tokens(chats, samples, folder):
    rows = [{"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.tolist()} for sample in samples]
    (folder / "tokens.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"{{type: tokens, path: {folder / 'tokens.jsonl'}}}"


def as_megatron(chats, samples, folder):
    write_samples(samples, folder / "ids", mask_prefix=folder / "masks", vocab_size=VOCAB_SIZE)
    return f"{{type: megatron, path: {folder / 'ids'}, loss_mask: {folder / 'masks'}}}"


def objects(store):
    """Return the bytes of every object and of every array's metadata, without the id of their store."""
    name = open_cache(store).record.store_id.encode()
    return {
        key: data.replace(name, b"")
        for key, data in contents(store).items()
        if isinstance(data, bytes) and not key.startswith(DIGESTS_OF_OBJECTS)
    }


@pytest.mark.parametrize("written", [as_gzip, as_parquet, as_dataset, as_tokens, as_megatron])
def test_the_store_is_the_one_of_json_lines(store, llama, chats, long_samples, tmp_path, written):
    (tmp_path / "data").mkdir()
    data = written(chats, long_samples, tmp_path / "data")
    other = precompute(llama, data, tmp_path / "store")
    one, same = open_cache(store), open_cache(other)
    assert one.lengths.tolist() == same.lengths.tolist()
    assert one.index.digest.tolist() == same.index.digest.tolist()
    for sample in range(len(one)):
        for column, values in one[sample].items():
            assert torch.equal(values, same[sample][column]), (sample, column)
    assert len(objects(store)) > 20
    assert objects(store) == objects(other)
    assert (one.record.store_id == same.record.store_id) == (written is as_gzip)
