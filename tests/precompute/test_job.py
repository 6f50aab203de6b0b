"""What is planned before any weight is loaded: a target cut to its first layers, and what the target can take."""

from functools import partial

import pytest
import torch

import dspark_store as ds
from dspark_store.cli.main import main as command
from dspark_store.cli.precompute import parse_arguments
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.job import plan_job
from dspark_store.precompute.job_target import plan_target
from dspark_store.target.load import load_target
from dspark_store.target.parallel import ParallelPlan
from dspark_store.target.source import TargetSource
from tests.precompute.jobs import arguments, differing_samples, precompute, refused
from tests.tiny import NUM_LAYERS, VOCAB_SIZE, save_target_dir, tiny_gpt2, tiny_llama, tiny_tokenizer

CUT = ("--target-num-hidden-layers", 2)


@pytest.fixture(scope="module")
def cut_store(llama, chats, tmp_path_factory):
    return precompute(llama, chats, tmp_path_factory.mktemp("cut") / "store", *CUT, "--target-layer-ids", 0, 1)


def test_the_store_of_a_cut_target_holds_its_states_and_is_marked(llama, cut_store):
    cache = ds.open_cache(cut_store, allow_reduced_depth=True)
    assert cache.manifest["num_hidden_layers"] == 2
    assert cache.manifest["target_num_hidden_layers_full"] == NUM_LAYERS
    assert dict(cache.target_config or {})["num_hidden_layers"] == 2
    source = TargetSource(str(llama))
    target = load_target(source, dtype=torch.float32, device=torch.device("cpu"), num_layers=2)
    assert differing_samples(target, cache, pad_token_id=0) == []


def test_training_from_a_cut_target_must_be_allowed(cut_store):
    loader = partial(ds.build_cached_dspark_dataloader, batch_size=2, shuffle=False)
    doors = (ds.open_cache, ds.CachedDSparkDataset, lambda path, **options: loader(cache_dir=path, **options))
    for door in doors:
        with pytest.raises(ValueError, match=r"cut to its first 2 of 4 layers .*allow_reduced_depth=True") as error:
            door(cut_store)
        assert "\n" not in str(error.value)
        assert len(door(cut_store, allow_reduced_depth=True)) > 0


def test_a_cut_store_is_verified_like_any_other(cut_store):
    assert command(["verify", str(cut_store)]) == 0


@pytest.mark.parametrize("flags", [(), ("--target-num-hidden-layers", 3)])
def test_a_cut_store_is_not_resumed_with_another_cut(llama, chats, cut_store, capsys, flags, no_target):
    job = arguments(llama, chats, cut_store, "--resume", "--target-layer-ids", 0, 1, *flags)
    line = refused(job, capsys)
    assert "does not match this run in num_hidden_layers: store 2" in line


def test_a_whole_store_is_not_resumed_with_a_cut(llama, chats, store, capsys, no_target):
    assert "num_hidden_layers: store 4, this run 2" in refused(arguments(llama, chats, store, "--resume", *CUT), capsys)


def test_a_cut_to_the_whole_depth_is_no_cut(job):
    identities = [plan_job(parse_arguments(job(*flags))).manifest for flags in ((), (CUT[0], NUM_LAYERS))]
    assert identities[0] == identities[1]


def test_layer_ids_are_those_of_the_cut_target(job, capsys, no_target):
    assert "[-1, 2] are not valid" in refused(job(*CUT, "--target-layer-ids", -1, 2), capsys)
    assert "target_num_hidden_layers 5 is not valid" in refused(job("--target-num-hidden-layers", 5), capsys)


@pytest.mark.parametrize(("flags", "warned"), [((), True), (("--target-layer-ids", 1, 2), False)])
def test_layers_that_sglang_cannot_capture_are_warned_about_by_default_too(job, caplog, flags, warned):
    plan_job(parse_arguments(job(*flags)))
    assert ("SGLang cannot capture layer ids [3]" in caplog.text) is warned


def test_positions_that_the_target_has_not_are_refused_before_it_is_loaded(tmp_path, job, capsys, no_target):
    target = save_target_dir(tmp_path / "gpt2", tiny_gpt2(n_positions=64))
    assert "seq-length 65 does not fit a gpt2 target" in refused(job("--seq-length", 65, target=target), capsys)


@pytest.mark.parametrize(
    ("added", "pad"), [({}, 0), ({"pad_token": "[PAD]"}, 1), ({"pad_token": "[PAD]", "eos_token": "[EOS]"}, 0)]
)
def test_the_pad_id_is_one_that_has_a_row_in_the_embedding(tmp_path, job, added, pad):
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_special_tokens(added)
    job = job(target=save_target_dir(tmp_path / "target", tiny_llama(vocab_size=rows), tokenizer))
    assert plan_job(parse_arguments(job)).manifest["pad_token_id"] == pad


def test_a_description_of_the_target_is_read_once(job, monkeypatch):
    config = parse_arguments(job(*CUT))
    planned = plan_job(config)
    monkeypatch.setattr("dspark_store.precompute.job_target.load_target_config", None)
    assert planned.target.num_layers == 2
    assert plan_target(config, 1, planned.target) == ParallelPlan(1)
    assert plan_job(config, planned.target).manifest == planned.manifest


def test_a_tokenizer_of_another_target_gives_a_warning(tmp_path, job, caplog):
    target = save_target_dir(tmp_path / "small", tiny_llama(vocab_size=VOCAB_SIZE - 32))
    assert main(job("--estimate", target=target)) == 0
    assert "256 embedding rows" in caplog.text
