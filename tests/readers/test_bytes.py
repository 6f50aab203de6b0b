"""How much is read: counted at the storage."""

from collections.abc import Buffer, Sequence
from pathlib import Path

import pytest
import torch

from dspark_store import Cache, CacheLoader
from dspark_store.format.files import LocalObject
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK
from dspark_store.format.storage import LocalStorage
from tests.stores import Shape, build_store

SIX_LAYERS = Shape(seq_length=128, shard_size=4, chunk_tokens=32, hidden_size=64, layer_ids=(0, 1, 2, 3, 4, 5))


class CountedObject(LocalObject):
    """An object that adds what it reads to its storage's count."""

    __slots__ = ("_storage",)

    def __init__(self, storage: "CountedStorage", key: str) -> None:
        super().__init__(storage.path(key))
        self._storage = storage

    def read(self, offset: int, length: int) -> bytes:
        data = super().read(offset, length)
        self._storage.count += len(data)
        return data

    def read_into(self, buffer: Buffer, offset: int) -> int:
        count = super().read_into(buffer, offset)
        self._storage.count += count
        return count

    def read_vector(self, buffers: Sequence[Buffer], offset: int) -> int:
        count = super().read_vector(buffers, offset)
        self._storage.count += count
        return count


class CountedStorage(LocalStorage):
    """A local storage that counts the bytes of opened objects."""

    count = 0

    def open(self, key: str) -> CountedObject:
        return CountedObject(self, key)


def bytes_read(path: Path, **request) -> int:
    storage = CountedStorage(path)
    cache = Cache(storage, threads=1, verify=True)
    for row in range(len(cache)):
        cache.read([row], **request)
    return storage.count


@pytest.fixture(scope="module", params=["none", "default"])
def store(request, tmp_path_factory) -> Path:
    lengths = (128, 100, 64, 128, 31, 128)
    path = tmp_path_factory.mktemp("bytes") / "store"
    return build_store(path, codec=request.param, lengths=lengths, shape=SIX_LAYERS).path


def test_two_of_six_layers_read_a_third_of_the_bytes(store):
    some = bytes_read(store, columns=(LAYERS,), layers=[1, 4])
    assert some <= 0.36 * bytes_read(store, columns=(LAYERS,))


def test_the_last_layer_and_the_last_states_are_read_once(store):
    together = bytes_read(store, columns=(LAYERS, LAST), layers=[5])
    assert together == bytes_read(store, columns=(LAST,))


def test_a_span_of_positions_reads_only_its_chunks(store):
    assert bytes_read(store, columns=(LAST,), positions=slice(0, 32)) < 0.5 * bytes_read(store, columns=(LAST,))


def test_columns_that_are_not_asked_for_are_not_read(store):
    assert bytes_read(store, columns=("loss_mask",)) < 0.2 * bytes_read(store, columns=(LAST,))


@pytest.mark.parametrize("kept", [True, False])
def test_small_token_columns_are_read_once_for_all_epochs(store, kept, monkeypatch):
    storage = CountedStorage(store)
    monkeypatch.setattr("dspark_store.readers.tokens.KEPT_TOKEN_BYTES", 579 * 5 if kept else 579 * 5 - 1)
    loader = CacheLoader(Cache(storage), 2, columns=(IDS, MASK), shuffle=False, min_supervised=0, dp_rank=0, dp_size=1)
    epochs = [list(loader)]
    after_one = storage.count
    epochs.append(list(loader))
    assert (storage.count == after_one) is kept
    whole = Cache(storage).read(range(6), columns=(IDS, MASK))
    for batches in epochs:
        for column in (IDS, MASK):
            assert torch.equal(torch.cat([batch[column] for batch in batches]), whole[column])
