"""Caches of NeMo Automodel, made as its format is described, become stores of the same bits."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import dspark_store
from dspark_store.cli.main import main
from dspark_store.compat.imports import find_cache, import_cache
from tests.upstream import manifest_of, shard_of

PAD = 39


@pytest.fixture
def folder(tmp_path):
    """A cache of five samples in three shards, whose last row ends in padding."""
    place = tmp_path / "cache"
    place.mkdir()
    for shard in range(3):
        tensors = shard_of(1 if shard == 2 else 2, seed=shard)
        tensors["loss_mask"][:, 0] = 1
        if shard == 2:
            tensors["input_ids"][0, 2:], tensors["loss_mask"][0, 2:] = PAD, 0
            tensors["target_last_hidden_states"][0, 0, 0] = torch.nan
        save_file(tensors, place / f"shard-{shard:06d}.safetensors")
    tables = {"embed_tokens.weight": torch.randn(40, 16), "lm_head.weight": torch.randn(40, 16)}
    save_file(tables, place / "target_weights.safetensors")
    write_manifest(place)
    return place


def write_manifest(place, **changes):
    fields = {key: value for key, value in manifest_of(5).items() if key != "mask_generation_prompt"}
    (place / "manifest.json").write_text(json.dumps({**fields, "format_version": 1, "complete": True, **changes}))


def check(store, place):
    cache = dspark_store.open_cache(store)
    assert dspark_store.verify_store(cache) == []
    for shard, path in enumerate(find_cache(place).shards):
        with safe_open(path, framework="pt") as file:
            for row in range(file.get_slice("input_ids").get_shape()[0]):
                sample = cache[2 * shard + row]
                for name in dspark_store.CACHE_KEYS:
                    assert torch.equal(sample[name].nan_to_num(7.0), file.get_tensor(name)[row].nan_to_num(7.0)), name
    assert cache.status.tolist() == [0, 0, 0, 0, 1]


def test_a_cache_becomes_a_store_of_the_same_bits_with_the_targets_weights(folder, tmp_path, capsys):
    assert main(["import", str(folder), "--output-dir", str(tmp_path / "store")]) == 0
    told = capsys.readouterr().out
    assert "NeMo Automodel cache: 5 samples in 3 shards, layers 1 3 5, fp32\n" in told
    assert "3 shards written, 0 were there" in told
    check(tmp_path / "store", folder)
    with safe_open(folder / "target_weights.safetensors", framework="pt") as file:
        assert torch.equal(
            dspark_store.open_cache(tmp_path / "store").weights().head, file.get_tensor("lm_head.weight")
        )
    assert main(["import", str(folder), "--output-dir", str(tmp_path / "store")]) == 0
    assert "0 shards written, 3 were there" in capsys.readouterr().out


def test_an_import_that_was_interrupted_goes_on(folder, tmp_path):
    seen = []

    def stop():
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_cache(find_cache(folder), tmp_path / "store", on_shard=stop)
    assert dspark_store.existing_shard_indices(tmp_path / "store") == {0, 1}
    assert import_cache(find_cache(folder), tmp_path / "store") == 1
    check(tmp_path / "store", folder)


def test_padding_is_cut_off_where_its_id_is_given_and_nothing_that_is_supervised(folder, tmp_path):
    import_cache(find_cache(folder), tmp_path / "store", pad_token_id=PAD)
    cache = dspark_store.open_cache(tmp_path / "store")
    assert cache.lengths[4] == 2
    assert cache[4]["input_ids"].tolist()[2:] == [PAD, PAD]
    with pytest.raises(ValueError, match="another cache or import, by pad_token_id"):
        import_cache(find_cache(folder), tmp_path / "store")
    assert dspark_store.verify_store(cache) == []


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda place: (place / "shard-000001.safetensors").unlink(), r"says 3 shards: missing \[1\], extra \[\]"),
        (lambda place: write_manifest(place, complete=False), "is incomplete"),
        (lambda place: write_manifest(place, format_version=2), "format_version 2, expected 1"),
        (lambda place: (place / "manifest.json").write_text("{}"), "is not that of a NeMo Automodel cache"),
        (lambda place: (place / "manifest.json").unlink(), "has no manifest.json"),
        (
            lambda place: (place / "manifest.json").write_text("{"),
            r"manifest\.json is not that of .*: Expecting property",
        ),
        (lambda place: (place / "manifest.json").write_text("[]"), r"manifest\.json is not that of .* an object"),
        (lambda place: write_manifest(place, num_samples="5"), "num_samples.* is '5', expected a whole number"),
        (lambda place: write_manifest(place, shard_size=0), "shard_size.* is 0, expected a whole number from 1"),
        (lambda place: write_manifest(place, target_layer_ids="1 2"), "target_layer_ids.* is '1 2', expected a list"),
        (lambda place: write_manifest(place, target_layer_ids=[-2]), "target_layer_ids.* is -2, expected a whole"),
        (lambda place: write_manifest(place, dtype="q"), "dtype 'q' is not"),
        (lambda place: cut(place / "shard-000001.safetensors"), "shard-000001.safetensors is cut short"),
        (lambda place: save_file({}, place / "shard-000001.safetensors"), "shard-000001.safetensors is cut short"),
        (
            lambda place: save_file(shard_of(1), place / "shard-000001.safetensors"),
            "has 1 samples, its manifest says 2",
        ),
    ],
)
def test_what_is_no_whole_cache_is_refused_by_name(harm, message, folder, tmp_path, capsys):
    harm(folder)
    assert main(["import", str(folder), "--output-dir", str(tmp_path / "store")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # behind the progress of the shards before
    assert error.startswith("error: ")
    assert re.search(message, error), error


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def test_a_store_of_another_cache_is_left_alone(folder, tmp_path):
    import_cache(find_cache(folder), tmp_path / "store")
    write_manifest(folder, shuffle_seed=7)
    with pytest.raises(ValueError, match="is of another cache or import, by shuffle_seed"):
        import_cache(find_cache(folder), tmp_path / "store")
