"""Configurations of NeMo Automodel: what each key sets, what has no meaning here, and what is refused."""

from pathlib import Path

import pytest
import torch
import yaml

import dspark_store as ds
from dspark_store.cli.precompute import parse_arguments
from dspark_store.compat.automodel_yaml import has_own_order, settings_of
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.__main__ import main
from tests.precompute.jobs import answers, arguments, interrupted, write_rows
from tests.stores import build_store
from tests.tiny import tiny_tokenizer

CONFIGS = Path(__file__).parent / "configs"
RECIPE = {
    "target_model_name_or_path": "org/target",
    "train_data_path": "chats.jsonl",
    "cache_output_dir": "cache",
    "seq_length": 512,
}


def recipe(**changes):
    return {"recipe_args": {**RECIPE, **changes}}


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_what_a_recipe_leaves_out_has_automodels_defaults():
    values, notes = settings_of(recipe())
    assert values == {
        "target_model": "org/target",
        "input_data": "chats.jsonl",
        "output_dir": "cache",
        "seq_length": 512,
        "batch_size": 1,
        "shard_size": 256,
        "fsdp_size": 0,
        "resume": True,
        "order": "automodel",
    }
    assert notes == []


def test_every_key_of_a_sharded_recipe_arrives_in_its_setting():
    config = parse_arguments(["-c", str(CONFIGS / "sharded.yaml")])
    config.check()
    assert (config.target_model, config.input_data, config.output_dir) == ("org/mixture", "chats.jsonl", "cache")
    assert (config.split, config.shuffle_seed, config.chat_template) == ("train[8:]", 7, "{{ messages }}")
    assert (config.dtype, config.shard_size, config.batch_size, config.seq_length) == ("fp16", 64, 1, 4096)
    assert (config.num_workers, config.draft_num_hidden_layers, config.target_num_hidden_layers) == (2, 3, 6)
    assert (config.target_layer_ids, config.backend, config.timeout_minutes) == ((), "gloo", 120)
    assert config.mask_reasoning_content
    assert config.mask_generation_prompt
    assert config.target_force_hf
    assert config.trust_remote_code
    assert config.resume
    assert (config.fsdp_size, config.ep_size, config.tp_size, config.pp_size) == (0, 8, 1, 1)


def test_one_line_names_all_that_has_no_meaning():
    path = str(CONFIGS / "sharded.yaml")
    (note,) = parse_arguments(["-c", path]).notes
    beginning, names = note.rsplit(": ", 1)
    assert beginning == f"{path}: accepted, and without meaning for a precompute"
    assert names.split(", ") == [
        "distributed.cp_size",
        "distributed.activation_checkpointing",
        "distributed.defer_fsdp_grad_sync",
        "distributed.moe",
        "recipe_args.target_attn_backend",
        "recipe_args.target_dispatcher",
        "recipe_args.target_experts",
        "recipe_args.target_enable_fsdp_optimizations",
    ]


def test_a_training_recipe_needs_only_to_be_told_where_the_store_goes(tmp_path):
    path = str(CONFIGS / "training.yaml")
    with pytest.raises(ValueError, match="cache_output_dir is required"):
        parse_arguments(["-c", path])
    config = parse_arguments(["-c", path, "--output-dir", "store"])
    config.check()
    assert (config.output_dir, config.target_layer_ids, config.batch_size) == ("store", (1, 9, 18), 1)
    in_vain, backend = config.notes
    assert "recipe, wandb, optimizer, lr_scheduler, checkpoint, " in in_vain
    assert "recipe_args.block_size" in in_vain
    assert "val_data_path" not in in_vain
    assert backend == f"{path}: dist_env.backend nccl needs CUDA, and torch sees no CUDA device: gloo takes its place"
    assert config.backend == ""


def test_nccl_is_no_matter_where_cuda_is_or_a_flag_names_the_backend(monkeypatch):
    document = {**recipe(), "dist_env": {"backend": "nccl"}}
    assert settings_of(document, {"backend"})[1] == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    values, notes = settings_of(document)
    assert "backend" not in values
    assert notes == []


def test_flags_win_over_the_file_and_stand_in_for_what_it_lacks(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"recipe_args": {"cache_shard_size": 3, "micro_batch_size": 2, "seq_length": 8}}))
    required = ("--target-model", "other", "--input-data", "a.jsonl", "--output-dir", "b")
    config = parse_arguments(["-c", str(path), *required, "--shard-size", "4", "--ep-size", "2", "--fsdp-size", "1"])
    config.check()
    assert (config.target_model, config.shard_size, config.batch_size, config.seq_length) == ("other", 4, 2, 8)
    assert (config.ep_size, config.fsdp_size) == (2, 1)
    config = parse_arguments(["-c", str(path), *required, "--batch-tokens", "4096"])
    config.check()
    assert (config.shard_size, config.batch_tokens) == (3, 4096)


def test_a_device_map_goes_with_a_recipe_that_shares_nothing():
    path = str(CONFIGS / "training.yaml")
    parse_arguments(["-c", path, "--output-dir", "store", "--device-map", "auto"]).check()


@pytest.mark.parametrize("key", ["target_model_name_or_path", "train_data_path", "seq_length", "cache_output_dir"])
def test_a_required_key_is_named_whether_it_is_absent_or_null(key):
    absent = {name: value for name, value in RECIPE.items() if name != key}
    for fields in (absent, {**RECIPE, key: None}):
        with pytest.raises(ValueError, match=f"recipe_args.{key} is required"):
            settings_of({"recipe_args": fields})


@pytest.mark.parametrize(
    ("strategy", "size"),
    [(None, 0), ("fsdp2", 0), ("FSDP2", 0), ("megatron-fsdp", 0), ("mfsdp", 0), ("ddp", 1)],
)
def test_the_strategy_says_whether_large_targets_are_sharded(strategy, size):
    values, notes = settings_of({**recipe(), "distributed": {"strategy": strategy}})
    assert values["fsdp_size"] == size
    assert notes == []


def test_sizes_of_no_meaning_are_told_unless_they_are_1_or_null():
    sizes = {"tp_size": 2, "pp_size": None, "ep_size": 3, "cp_size": 1, "dp_size": 4, "dp_replicate_size": 2}
    values, (note,) = settings_of({**recipe(), "distributed": sizes})
    assert [values.get(name) for name in ("tp_size", "pp_size", "ep_size")] == [2, None, 3]
    assert note.endswith(": distributed.dp_size, distributed.dp_replicate_size")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (recipe(mirco_batch_size=1), "'recipe_args.mirco_batch_size'; the nearest known one is 'recipe_args.micro_ba"),
        (recipe(mirco_batch_size=None), "unknown key 'recipe_args.mirco_batch_size'"),
        ({**recipe(), "optimiser": {}}, "unknown key 'optimiser'; the nearest known one is 'optimizer'"),
        ({**recipe(), "distributed": {"tp": 1}}, "'distributed.tp'; the nearest known one is 'distributed.tp_size'"),
        ({**recipe(), "dist_env": {"timeout": 1}}, "the nearest known one is 'dist_env.timeout_minutes'"),
        ({**recipe(), "codec": "none"}, "'codec' cannot stand beside recipe_args: give it as the flag --codec"),
        (
            {**recipe(), "distributed": {"strategy": "zero"}},
            "distributed.strategy must be one of fsdp2, .*, got 'zero'",
        ),
        ({"recipe_args": [1]}, "recipe_args must be a mapping of keys, not list"),
        ({**recipe(), "dist_env": "nccl"}, "dist_env must be a mapping of keys, not str"),
        (recipe(seq_length="long"), "recipe_args.seq_length cannot be 'long': expected a whole number"),
        (recipe(trust_remote_code="no"), "recipe_args.trust_remote_code cannot be 'no': expected true or false"),
        (recipe(target_layer_ids="1,2"), "recipe_args.target_layer_ids cannot be '1,2': expected a list of whole"),
        (recipe(train_data_path=5), "recipe_args.train_data_path cannot be 5: expected a source of tokens"),
        (
            {**recipe(), "dist_env": {"timeout_minutes": "soon"}},
            "dist_env.timeout_minutes cannot be 'soon': expected a",
        ),
        (
            {**recipe(), "distributed": {"ep_size": [8]}},
            r"distributed.ep_size cannot be \[8\]: expected a whole number",
        ),
        (recipe(micro_batch_size=0), "recipe_args.micro_batch_size must be >= 1, got 0"),
        (recipe(multimodal=True), "recipe_args.multimodal is not supported"),
    ],
)
def test_a_mistake_is_one_line_with_the_key_of_the_file(document, message):
    with pytest.raises(ValueError, match=message) as refused:
        settings_of(document)
    assert "\n" not in str(refused.value)


def test_what_is_not_supported_may_be_switched_off():
    assert settings_of(recipe(multimodal=False))[1] == []


WORDS = ["one", "two", "three", "four", "five"]


@pytest.fixture
def begin(llama, tmp_path):
    """Return the flags of a job from Automodel's YAML over five rows, and those of the same job in our own words."""
    data = write_rows(tmp_path / "data.jsonl", WORDS)
    fields = {"target_model_name_or_path": str(llama), "train_data_path": str(data), "train_split": "train[:3]"}
    path = tmp_path / "automodel.yaml"
    path.write_text(yaml.safe_dump(recipe(**fields, cache_output_dir=str(tmp_path / "store"))))
    flags = ["-c", str(path), "--device", "cpu", "--fsdp-size", "1"]
    own = arguments(llama, data, tmp_path / "store", "--dtype", "bf16", "--split", "train[:3]")
    return flags, [*own, "--batch-size", "1", "--shard-size", "256", "--seq-length", "512"]


def order_of(cache):
    return cache.manifest["source"].get("order")


def test_automodels_yaml_reads_the_rows_that_automodel_reads(begin, tmp_path, caplog):
    flags, own = begin
    assert main(flags) == 0
    cache = ds.open_cache(tmp_path / "store")
    assert answers(cache, tiny_tokenizer()) == WORDS
    assert order_of(cache) == "automodel"
    assert "split train[:3] takes nothing away" in caplog.text
    assert main(flags) == 0
    assert main([*own, "--resume"]) == 2
    assert main([*own, "--resume", "--order", "automodel"]) == 0


def test_a_store_that_was_begun_in_our_order_is_gone_on_with_in_it(begin, tmp_path, capsys):
    flags, own = begin
    interrupted(own)
    assert "has its rows in our own order, and is gone on with in it" in parse_arguments(flags).notes[-1]
    assert main([*flags, "--order", "automodel"]) == 2
    assert "source.order: store None, this run 'automodel'" in capsys.readouterr().err
    assert main(flags) == 0
    cache = ds.open_cache(tmp_path / "store")
    assert len(cache) == 3
    assert answers(cache, tiny_tokenizer()) != WORDS[:3]
    assert order_of(cache) is None


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ({"type": "chat"}, True),
        ({"type": "chat", "order": "automodel"}, False),
        ({"type": "blend", "parts": [{"type": "chat"}, {"type": "megatron"}]}, True),
        ({"type": "blend", "parts": [{"type": "megatron"}, {"type": "chat", "order": "automodel"}]}, False),
    ],
)
def test_a_store_has_our_own_order_where_no_source_of_it_names_another(source, own, tmp_path):
    build_store(tmp_path, fields={"manifest": {"source": source}})
    assert has_own_order(LocalStorage(tmp_path)) == own
    assert not has_own_order(LocalStorage(tmp_path / "none"))
