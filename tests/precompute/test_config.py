"""The settings: the same names and defaults as upstream's flags, from the command line, from YAML, or from both."""

import dataclasses
import os

import pytest
import torch

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


def test_a_flag_that_bounds_batches_takes_the_place_of_the_files_bound(tmp_path):
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
        ("input_data", 5),
        ("target_model", {"name": "a"}),
        ("split", True),
        ("take_over", "no"),
        ("tp_size", 1.5),
        ("target_num_hidden_layers", "half"),
        ("tokens_per_second", "nan"),
        ("tokens_per_second", float("inf")),
        ("timeout_minutes", "soon"),
        ("timeout_minutes", float("nan")),
        ("seq_length", float("inf")),
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
        (["--tokens-per-second", "0"], "tokens-per-second must be a finite number > 0, got 0"),
        (["--tp-size", "0"], "tp-size must be >= 1, got 0"),
        (["--ep-size", "0"], "ep-size must be >= 1, got 0"),
        (["--pp-size", "-1"], "pp-size must be >= 1, got -1"),
        (["--fsdp-size", "-1"], "fsdp-size must be >= 0, got -1"),
        (["--target-num-hidden-layers", "0"], "target-num-hidden-layers must be >= 1, got 0"),
        (["--timeout-minutes", "-2"], "timeout-minutes must be a finite number > 0, got -2"),
        (["--write-buffer-bytes", "0"], "write-buffer-bytes must be >= 1, got 0"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments).check()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["tokens_per_second", "timeout_minutes"])
def test_a_number_that_is_not_finite_is_refused_from_a_flag_and_in_python(name, value):
    with pytest.raises(ValueError, match=rf"setting '{name}' cannot be -?(nan|inf): expected a finite number"):
        parse(f"--{name.replace('_', '-')}={value}")
    with pytest.raises(ValueError, match="must be a finite number > 0"):
        dataclasses.replace(parse(), **{name: float(value)}).check()


def test_every_new_setting_is_a_flag_and_a_key(tmp_path):
    sizes = {"tp_size": 2, "ep_size": 3, "pp_size": 4, "fsdp_size": 5, "target_num_hidden_layers": 6}
    switches = {"take_over": True, "profile": True, "mix_equality_classes": True}
    values = {**sizes, **switches, "timeout_minutes": 0.5, "reduce_dtype": "fp32", "backend": "gloo"}
    text = "".join(f"{name}: {str(value).lower()}\n" for name, value in values.items())
    flags = ([_flag(name)] if value is True else [_flag(name), str(value)] for name, value in values.items())
    config = parse_yaml(tmp_path, text, *REQUIRED)
    config.check()
    assert {name: getattr(config, name) for name in values} == values
    assert parse(*(word for words in flags for word in words)) == config


def test_without_new_settings_a_job_is_one_replica_a_rank():
    config = parse()
    assert (config.tp_size, config.ep_size, config.pp_size, config.fsdp_size) == (1, 1, 1, 1)
    assert (config.reduce_dtype, config.device_map, config.target_num_hidden_layers) == ("compute", None, None)
    assert (config.timeout_minutes, config.backend) == (30, "")
    assert (config.take_over, config.profile, config.mix_equality_classes) == (False, False, False)


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


def test_a_file_in_another_encoding_is_one_line(tmp_path):
    (tmp_path / "job.yaml").write_bytes("input_data: café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"configuration file .*job\.yaml is not UTF-8: .* at byte 15$"):
        parse_arguments(["-c", str(tmp_path / "job.yaml")])


def test_a_file_is_utf8_in_any_locale(tmp_path):
    (tmp_path / "job.yaml").write_bytes("input_data: café".encode())
    assert parse_arguments(["-c", str(tmp_path / "job.yaml"), *REQUIRED[:2], *REQUIRED[4:]]).input_data == "café"


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
