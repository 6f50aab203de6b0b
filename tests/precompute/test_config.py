"""The settings: the same names and defaults as upstream's flags, from the command line, from YAML, or from both."""

import dataclasses
import os

import pytest
import torch

from dspark_store.precompute.config import PrecomputeConfig, config_from, parse_arguments

REQUIRED = ["--target-model", "org/target", "--input-data", "chats.jsonl", "--output-dir", "store"]
REQUIRED_VALUES = {"target_model": "org/target", "input_data": "chats.jsonl", "output_dir": "store"}


def parse(*arguments):
    return parse_arguments([*REQUIRED, *arguments])


def parse_yaml(tmp_path, text, *arguments):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return parse_arguments([*arguments, "-c", str(path)])


def test_the_defaults_are_upstreams():
    config = parse()
    upstream = {
        "target_model": "org/target",
        "input_data": "chats.jsonl",
        "output_dir": "store",
        "seq_length": 2048,
        "batch_size": 4,
        "shard_size": 256,
        "dtype": "bf16",
        "num_workers": 0,
        "split": None,
        "shuffle_seed": 42,
        "draft_num_hidden_layers": 5,
        "target_layer_ids": (),
        "chat_template": None,
        "mask_reasoning_content": False,
        "target_force_hf": False,
        "trust_remote_code": False,
        "resume": False,
        "target_attn_implementation": None,
        "log_level": "INFO",
    }
    assert {name: getattr(config, name) for name in upstream} == upstream
    config.check()


def test_every_flag_of_upstream_is_understood():
    config = parse(
        *("--seq-length", "4096", "--batch-size", "2", "--shard-size", "64", "--dtype", "fp16", "--device", "cpu"),
        *("--num-workers", "3", "--split", "train[:10]", "--shuffle-seed", "7", "--draft-num-hidden-layers", "2"),
        *("--target-layer-ids", "-1", "3", "9", "--chat-template", "{{ messages }}", "--mask-reasoning-content"),
        *("--target-force-hf", "--trust-remote-code", "--resume", "--target-attn-implementation", "eager"),
        *("--log-level", "DEBUG"),
    )
    assert (config.seq_length, config.batch_size, config.shard_size) == (4096, 2, 64)
    assert (config.dtype, config.device, config.num_workers) == ("fp16", "cpu", 3)
    assert (config.split, config.shuffle_seed, config.draft_num_hidden_layers) == ("train[:10]", 7, 2)
    assert (config.target_layer_ids, config.chat_template) == ((-1, 3, 9), "{{ messages }}")
    assert (config.target_attn_implementation, config.log_level) == ("eager", "DEBUG")
    assert config.mask_reasoning_content
    assert config.target_force_hf
    assert config.trust_remote_code
    assert config.resume


def test_yaml_fills_the_same_settings_as_flags(tmp_path):
    text = """
target_model: org/target
input-data: chats.jsonl
output_dir: store
seq-length: 512
target_layer_ids: [1, 2]
resume: true
tokens_per_second: 1000
split: null
batch_size: null
"""
    config = parse_yaml(tmp_path, text)
    flags = ("--seq-length", "512", "--target-layer-ids", "1", "2", "--resume", "--tokens-per-second", "1000")
    assert config == parse(*flags)


def test_a_flag_wins_over_the_file(tmp_path):
    text = "input_data: other.jsonl\nseq_length: 512\nshuffle_seed: 7\n"
    config = parse_yaml(tmp_path, text, *REQUIRED, "--shuffle-seed", "none")
    assert (config.input_data, config.seq_length, config.shuffle_seed) == ("chats.jsonl", 512, None)


@pytest.mark.parametrize(("value", "seed"), [("none", None), ("None", None), ("null", None), ("7", 7), ("0", 0)])
def test_the_shuffle_seed_of_a_file_is_a_number_or_none(tmp_path, value, seed):
    assert parse_yaml(tmp_path, f"shuffle_seed: {value}", *REQUIRED).shuffle_seed == seed


def test_an_empty_file_changes_nothing(tmp_path):
    assert parse_yaml(tmp_path, "", *REQUIRED) == parse()


@pytest.mark.parametrize(
    ("key", "nearest"), [("batchsize", "batch_size"), ("target_layers", "target_layer_ids"), ("seq_len", "seq_length")]
)
def test_an_unknown_key_suggests_the_nearest_known_one(tmp_path, key, nearest):
    with pytest.raises(ValueError, match=f"unknown setting '{key}'; the nearest known one is '{nearest}'"):
        parse_yaml(tmp_path, f"{key}: 1", *REQUIRED)


def test_a_missing_required_setting_is_named():
    with pytest.raises(ValueError, match="required but not given: --input-data"):
        parse_arguments(["--target-model", "org/target", "--output-dir", "store"])


def test_a_required_setting_cannot_be_null(tmp_path):
    with pytest.raises(ValueError, match="required but not given: --target-model"):
        parse_yaml(tmp_path, "target_model: null\ninput_data: a\noutput_dir: b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_length", "many"),
        ("seq_length", 2.5),
        ("seq_length", True),
        ("seq_length", [1]),
        ("shuffle_seed", "random"),
        ("shuffle_seed", 4.2),
        ("shuffle_seed", False),
        ("target_layer_ids", "1 2"),
        ("target_layer_ids", [1, "two"]),
        ("target_layer_ids", [1.5]),
        ("target_layer_ids", [True]),
        ("target_layer_ids", {"a": 1}),
        ("resume", "yes please"),
        ("resume", 1),
        ("max_samples", "all"),
        ("tokens_per_second", "fast"),
        ("tokens_per_second", True),
        ("input_data", ["a", "b"]),
        ("target_model", {"name": "a"}),
        ("split", True),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_setting(name, value):
    with pytest.raises(ValueError, match=f"setting '{name}' cannot be "):
        config_from({**REQUIRED_VALUES, name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "batch-size must be >= 1, got 0"),
        (["--shard-size", "0"], "shard-size must be >= 1, got 0"),
        (["--batch-size", "4", "--shard-size", "7"], "shard-size 7 is not a multiple of batch-size 4"),
        (["--draft-num-hidden-layers", "0"], "draft-num-hidden-layers must be >= 1, got 0"),
        (["--seq-length", "0"], "seq-length must be >= 1, got 0"),
        (["--num-workers", "-1"], "num-workers must be >= 0, got -1"),
        (["--smoke", "-1"], "smoke must be >= 0, got -1"),
        (["--max-samples", "0"], "max-samples must be >= 1, got 0"),
        (["--tokens-per-second", "0"], "tokens-per-second must be > 0, got 0"),
        (["--write-buffer-bytes", "0"], "write-buffer-bytes must be >= 1, got 0"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments).check()


@pytest.mark.parametrize("name", ["dtype", "codec", "compute_dtype", "on_nonfinite", "log_level"])
def test_a_choice_that_is_none_is_refused_from_a_flag_and_from_a_file(name):
    with pytest.raises(ValueError, match=r"invalid choice: 'bad'.*see --help"):
        parse(f"--{name.replace('_', '-')}", "bad")
    with pytest.raises(ValueError, match=rf"{name.replace('_', '-')} must be one of .*, got 'bad'"):
        config_from({**REQUIRED_VALUES, name: "bad"}).check()


def test_an_unknown_flag_is_one_line():
    with pytest.raises(ValueError, match="unrecognized arguments: --bad"):
        parse("--bad", "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML"), ("- a\n- b\n", "must be a mapping of settings, not list"), ("a: 1: 2", "is not YAML")],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"job\.yaml {message}"):
        parse_yaml(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"configuration file .*absent\.yaml does not exist"):
        parse_arguments(["-c", str(tmp_path / "absent.yaml")])


@pytest.mark.parametrize("name", ["tpu9", "meta", "mps", "cuda:-1"])
def test_a_device_that_cannot_be_used_is_named(name):
    with pytest.raises(ValueError, match=f"device '{name}' is "):
        _ = parse("--device", name).resolved_device


def test_the_device_is_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse().resolved_device == torch.device("cpu")
    with pytest.raises(ValueError, match="device 'cuda' is not there"):
        _ = parse("--device", "cuda").resolved_device


def test_encoder_threads_follow_the_cores_up_to_eight(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert (parse().resolved_encode_threads, parse("--encode-threads", "5").resolved_encode_threads) == (3, 5)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert parse().resolved_encode_threads == 8


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [field.name for field in dataclasses.fields(PrecomputeConfig) if _flag(field.name) not in text] == []


def _flag(name):
    return f"--{name.replace('_', '-')}"
