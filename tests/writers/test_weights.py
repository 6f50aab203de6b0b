import pytest
import torch

from dspark_store.format.storage import LocalStorage
from dspark_store.readers.index import read_weights
from dspark_store.writers.weights import write_weights
from tests.writers.small_store import HIDDEN_SIZE, small_record

EMBED, HEAD = "target/embed_tokens/weight/c.0.0", "target/lm_head/weight/c.0.0"


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def table(seed, rows=40):
    return torch.randn(rows, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))


def test_tables_come_back_in_the_cache_dtype(storage):
    record = write_weights(storage, small_record(), table(0), table(1), table(2)[:, 0], tied=False)
    weights = read_weights(storage, record)
    assert torch.equal(weights.embed, table(0).bfloat16())
    assert torch.equal(weights.head, table(1).bfloat16())
    assert weights.bias is not None
    assert torch.equal(weights.bias, table(2)[:, 0].bfloat16())


def test_a_tied_head_is_one_file_in_two_places(storage):
    record = write_weights(storage, small_record(), table(0), table(0), tied=True)
    assert storage.path(EMBED).samefile(storage.path(HEAD))
    assert torch.equal(read_weights(storage, record).head, table(0).bfloat16())


def test_an_untied_head_is_a_file_of_its_own(storage):
    write_weights(storage, small_record(), table(0), table(0), tied=False)
    assert not storage.path(EMBED).samefile(storage.path(HEAD))


def test_tables_that_were_tied_can_be_written_again_untied(storage):
    write_weights(storage, small_record(), table(0), table(0), tied=True)
    record = write_weights(storage, small_record(), table(0), table(1), tied=False)
    weights = read_weights(storage, record)
    assert torch.equal(weights.embed, table(0).bfloat16())
    assert torch.equal(weights.head, table(1).bfloat16())


def test_writing_the_same_tables_again_gives_the_same_bytes(storage):
    write_weights(storage, small_record(), table(0), table(1), tied=False)
    before = storage.read(EMBED), storage.read(HEAD)
    write_weights(storage, small_record(), table(0), table(1), tied=False)
    assert (storage.read(EMBED), storage.read(HEAD)) == before
