import shutil

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from dspark_store.target import fingerprint
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.source import TargetSource
from tests.tiny import save_tiny, tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tiny_llama(), tmp_path_factory.mktemp("llama"))


def weights(directory):
    return target_fingerprint(TargetSource(str(directory)))["weights"]


def retrained(directory, to, name):
    """Copy a model with the first number of the tensor `name` changed."""
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    tensors[name].view(-1)[0] += 1
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_copy_elsewhere_has_the_same_fingerprint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    expected = {"weights": weights(saved), "revision": ""}
    assert target_fingerprint(TargetSource(str(tmp_path / "copy"))) == expected


def test_a_retrained_tensor_changes_the_fingerprint(saved, tmp_path):
    assert weights(retrained(saved, tmp_path / "copy", "model.layers.2.mlp.up_proj.weight")) != weights(saved)


def test_every_small_tensor_of_a_large_file_is_sampled(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_EDGE_BYTES", 1024)
    monkeypatch.setattr(fingerprint, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(fingerprint, "_BLOCKS", 8)
    known = weights(saved)
    for index, name in enumerate(load_file(saved / "model.safetensors")):
        assert weights(retrained(saved, tmp_path / str(index), name)) != known


def test_only_a_sample_of_a_large_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "pytorch_model.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    known = weights(tmp_path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert weights(tmp_path) != known


def test_what_transformers_would_not_load_does_not_count(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    (copy / "pytorch_model.bin").write_bytes(b"older")
    (copy / "README.md").write_text("changed")
    assert weights(copy) == weights(saved)


def test_all_files_of_a_sharded_checkpoint_count(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    known = weights(tmp_path)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1] + b"x")
    assert weights(tmp_path) != known


def test_a_missing_shard_is_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        weights(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot load the weights of model .*model\.safetensors"):
        weights(tmp_path)


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_a_cached_hub_model_stands_for_its_snapshot(tmp_path, monkeypatch, max_shard_size):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    tiny_llama().save_pretrained(snapshot, max_shard_size=max_shard_size)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    found = target_fingerprint(TargetSource("someone/tiny"))
    assert found == {"weights": weights(snapshot), "revision": COMMIT}
