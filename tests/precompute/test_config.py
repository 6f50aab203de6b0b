"""The settings: the same names and defaults as upstream's flags, from the command line, from YAML, or from both."""

import dataclasses
import os

import pytest
import torch
import yaml

from dspark_store.cli.precompute import parse_arguments
from dspark_store.precompute.settings import PrecomputeConfig, config_from, settings
from dspark_store.target.batches import PaddedTokens

REQUIRED = ["--target-model", "org/target", "--input-data", "chats.jsonl", "--output-dir", "store"]
REQUIRED_VALUES = {"target_model": "org/target", "input_data": "chats.jsonl", "output_dir": "store"}


def parse(*arguments):
    return parse_arguments([*REQUIRED, *arguments])


def parse_yaml(tmp_path, text, *arguments):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return parse_arguments([*arguments, "-c", str(path)])


def test_the_defaults_are_upstreams_and_one_replica_per_rank():
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
    ours = {"reduce_dtype": "compute", "device_map": None, "target_num_hidden_layers": None, "timeout_minutes": 30}
    ours |= dict.fromkeys(("tp_size", "ep_size", "pp_size", "fsdp_size"), 1)
    ours |= dict.fromkeys(("take_over", "profile", "mix_equality_classes"), False)
    assert {name: getattr(config, name) for name in (*upstream, *ours)} == {**upstream, **ours}
    config.check()


def test_every_setting_is_a_flag_and_a_key_of_a_file(tmp_path):
    text = """
        seq_length: 4096, batch_size: 2, shard_size: 64, dtype: bf16, mantissa_bits: 3, device: cpu, num_workers: 3,
        split: "train[:10]", shuffle_seed: 7, draft_num_hidden_layers: 2, target_layer_ids: [-1, 3, 9],
        chat_template: "{{ messages }}",
        mask_reasoning_content: true, target_force_hf: true, trust_remote_code: true, resume: true, log_level: DEBUG,
        target_attn_implementation: eager, tokens_per_second: 1000.0, tp_size: 2, ep_size: 3, pp_size: 4, fsdp_size: 5,
        target_num_hidden_layers: 6, take_over: true, profile: true, mix_equality_classes: true, timeout_minutes: 0.5,
        reduce_dtype: fp32, backend: gloo"""
    values = yaml.safe_load(f"{{{text}}}")
    in_file = {name.replace("_", "-"): value for name, value in values.items()}
    config = parse_yaml(tmp_path, yaml.safe_dump({**in_file, "max_samples": None}), *REQUIRED)
    config.check()
    assert {name: getattr(config, name) for name in values} == {**values, "target_layer_ids": (-1, 3, 9)}
    words = {_flag(name): [] if value is True else value for name, value in values.items()}
    parts = ([flag, *map(str, value if isinstance(value, list) else [value])] for flag, value in words.items())
    assert parse(*(word for part in parts for word in part)) == config


def test_a_flag_wins_over_the_file(tmp_path):
    text = "input_data: other.jsonl\nseq_length: 512\nshuffle_seed: 7\n"
    config = parse_yaml(tmp_path, text, *REQUIRED, "--shuffle-seed", "none")
    assert (config.input_data, config.seq_length, config.shuffle_seed) == ("chats.jsonl", 512, None)


def test_a_flag_that_bounds_batches_takes_the_place_of_the_files_bound(tmp_path):
    assert parse_yaml(tmp_path, "", *REQUIRED) == parse()
    by_tokens = parse_yaml(tmp_path, "batch_size: 3", *REQUIRED, "--batch-tokens", "4096")
    by_samples = parse_yaml(tmp_path, "batch_tokens: 4096", *REQUIRED, "--batch-size", "3", "--shard-size", "9")
    for config in (by_tokens, by_samples):
        config.check()
    assert (by_tokens.batch_limit, by_samples.batch_limit) == (PaddedTokens(4096), 3)
    with pytest.raises(ValueError, match="batch-tokens 4096 and batch-size 3 both bound a batch"):
        parse_yaml(tmp_path, "batch_tokens: 4096\nbatch_size: 3", *REQUIRED)
    with pytest.raises(ValueError, match="batch-tokens must be >= 1, got 0"):
        parse_yaml(tmp_path, "batch_tokens: 0", *REQUIRED).check()


@pytest.mark.parametrize(("value", "seed"), [("none", None), ("None", None), ("null", None), ("7", 7), ("0", 0)])
def test_the_shuffle_seed_of_a_file_is_a_number_or_none(tmp_path, value, seed):
    assert parse_yaml(tmp_path, f"shuffle_seed: {value}", *REQUIRED).shuffle_seed == seed


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
        ("shuffle_seed", "random"),
        ("shuffle_seed", 4.2),
        ("target_layer_ids", "1 2"),
        ("target_layer_ids", [True]),
        ("resume", 1),
        ("max_samples", "all"),
        ("input_data", 5),
        ("target_model", {"name": "a"}),
        ("split", True),
        ("tokens_per_second", "nan"),
        ("tokens_per_second", float("inf")),
        ("seq_length", float("inf")),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_setting(name, value):
    with pytest.raises(ValueError, match=f"setting '{name}' cannot be "):
        config_from({**REQUIRED_VALUES, name: value})


LEAST = {
    **dict.fromkeys(("batch_size", "shard_size", "draft_num_hidden_layers", "seq_length", "max_samples"), 1),
    **dict.fromkeys(("tp_size", "ep_size", "pp_size", "target_num_hidden_layers", "write_buffer_bytes"), 1),
    **dict.fromkeys(("num_workers", "smoke", "fsdp_size", "encode_threads", "chunk_tokens"), 0),
}


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_a_number_that_cannot_be_is_refused_by_its_flag(name, least):
    with pytest.raises(ValueError, match=f"^{_flag(name)[2:]} must be >= {least}, got {least - 1}$"):
        parse(_flag(name), str(least - 1)).check()


def test_a_shard_that_is_no_whole_number_of_batches_is_refused():
    with pytest.raises(ValueError, match="shard-size 7 is not a multiple of batch-size 4"):
        parse("--batch-size", "4", "--shard-size", "7").check()


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", ["tokens_per_second", "timeout_minutes"])
def test_a_rate_or_time_is_finite_and_more_than_nothing(name, value):
    with pytest.raises(ValueError, match=rf"setting '{name}' cannot be (nan|inf): expected a finite number"):
        parse(f"{_flag(name)}={value}")
    for wrong in (float(value), 0.0, -2.0):
        with pytest.raises(ValueError, match=f"{_flag(name)[2:]} must be a finite number > 0, got {wrong}"):
            dataclasses.replace(parse(), **{name: wrong}).check()


@pytest.mark.parametrize("axis", ["tp-size", "ep-size", "pp-size", "fsdp-size"])
def test_a_device_map_stands_alone(axis):
    parse("--device-map", "auto").check()
    parse("--device-map", "auto", "--fsdp-size", "0").check()
    with pytest.raises(ValueError, match=f"device-map auto places the target in one process, but {axis} is 2"):
        parse("--device-map", "auto", f"--{axis}", "2").check()


@pytest.mark.parametrize(
    ("model_type", "world_size", "size"),
    [("deepseek_v4", 8, 4), ("glm_moe_dsa", 8, 4), ("kimi_k3", 2, 1), ("kimi_linear", 1, 1), ("qwen3_moe", 8, 1)],
)
def test_an_fsdp_size_of_0_shards_where_automodel_does_over_the_ranks_that_are_left(model_type, world_size, size):
    assert parse("--fsdp-size", "0", "--ep-size", "2").resolved_fsdp_size(model_type, world_size) == size
    assert parse("--fsdp-size", "0", "--pp-size", "2").resolved_fsdp_size(model_type, world_size) == 1
    assert parse("--fsdp-size", "3").resolved_fsdp_size(model_type, world_size) == 3
    assert parse().resolved_fsdp_size(model_type, world_size) == 1


def test_the_backend_follows_the_device(monkeypatch):
    assert parse("--device", "cpu").resolved_backend == "gloo"
    with pytest.raises(ValueError, match="backend nccl moves tensors between CUDA devices, and the device is cpu"):
        _ = parse("--device", "cpu", "--backend", "nccl").resolved_backend
    monkeypatch.setattr(PrecomputeConfig, "resolved_device", torch.device("cuda"))
    assert parse().resolved_backend == "nccl"
    assert parse("--backend", "gloo").resolved_backend == "gloo"


@pytest.mark.parametrize(
    "name", ["dtype", "codec", "compute_dtype", "on_nonfinite", "log_level", "reduce_dtype", "device_map", "backend"]
)
def test_a_choice_that_is_none_is_refused_from_a_flag_and_from_a_file(name):
    with pytest.raises(ValueError, match=r"invalid choice: 'bad'.*see --help"):
        parse(f"--{name.replace('_', '-')}", "bad")
    with pytest.raises(ValueError, match=rf"{name.replace('_', '-')} must be one of .*, got 'bad'"):
        config_from({**REQUIRED_VALUES, name: "bad"}).check()


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML"), ("- a\n- b\n", "must be a mapping of settings, not list"), ("a: 1: 2", "is not YAML")],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"job\.yaml {message}"):
        parse_yaml(tmp_path, text)


def test_a_file_is_utf8_in_any_locale_and_named_where_it_cannot_be_read(tmp_path):
    path = tmp_path / "job.yaml"
    with pytest.raises(FileNotFoundError, match=r"configuration file .*job\.yaml does not exist"):
        parse_arguments(["-c", str(path)])
    path.write_bytes("input_data: café".encode())
    assert parse_arguments(["-c", str(path), *REQUIRED[:2], *REQUIRED[4:]]).input_data == "café"
    path.write_bytes("input_data: café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"configuration file .*job\.yaml is not UTF-8: .* at byte 15$"):
        parse_arguments(["-c", str(path)])


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
    assert [name for name in settings() if _flag(name) not in text] == []


def _flag(name):
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("in_file", [True, False], ids=["yaml", "flags"])
def test_the_options_of_rows_are_settings_and_flags(tmp_path, in_file):
    if in_file:
        lines = "columns: {messages: chat}\nchat_template_kwargs: {enable_thinking: false}\ntext_column: text\n"
        config = parse_yaml(tmp_path, lines, *REQUIRED)
    else:
        columns = ("--columns", "messages=chat", "--text-column", "text")
        config = parse(*columns, "--chat-template-kwargs", '{"enable_thinking": false}')
    assert config.columns == {"messages": "chat"}
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.text_column == "text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chat-template-kwargs", "no"), "chat_template_kwargs is 'no', which is not JSON"),
        (("--chat-template-kwargs", '{"tools": []}'), "chat_template_kwargs has 'tools', which is given"),
        (("--columns", "chat"), "columns: 'chat' is no name=column; for example messages=conversation"),
    ],
)
def test_options_of_rows_that_cannot_be_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)
