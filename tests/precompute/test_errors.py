"""Mistakes end the command with one line and exit code 2, damaged stores with 1, and leave nothing half-written."""

import json
from typing import Any

import pytest
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import dspark_store as ds
from dspark_store.precompute.__main__ import main
from tests.precompute.jobs import contents, refused, states_of_files, write_rows
from tests.tiny import save_target_dir, save_tiny, tiny_llama, tiny_tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 288,
}
USER = {"role": "user", "content": "what"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--shard-size", 7), "shard-size 7 is not a multiple of batch-size 2"),
        (("--batch-tokens", 64), "batch-tokens 64 and batch-size 2 both bound a batch: give one of the two"),
        (("--codec", "zip"), "argument --codec: invalid choice: 'zip'"),
        (("--seq-length", "long"), "argument --seq-length: invalid int value: 'long'"),
        (("--no-such-flag",), "unknown flag --no-such-flag; the nearest is --"),
        (("--device", "tpu9"), "device 'tpu9' is unknown"),
        (("--target-layer-ids", 1, 4), "layer ids [1, 4] are not valid"),
        (("--chat-template", "missing.jinja"), "chat template 'missing.jinja' is neither a file"),
        (("--chat-template", "{% if %}"), "chat template is not valid Jinja"),
        (("--split", "train[1.5:]"), "split 'train[1.5:]' is not understood"),
        (("--split", "train[99:]"), "split 'train[99:]' selects none of the 11 rows"),
        (("--shuffle-seed", -1), "shuffle seed -1 is negative"),
    ],
)
def test_a_wrong_flag_is_one_line(job, tmp_path, capsys, flags, expected):
    assert expected in refused(job(*flags), capsys, at_once=True)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_of_a_file_is_one_line(job, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("batchsize: 4")
    line = refused(job("-c", tmp_path / "job.yaml"), capsys, at_once=True)
    assert line == "error: unknown setting 'batchsize'; the nearest known one is 'batch_size'"
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_a_missing_file_is_one_line(job, tmp_path, capsys):
    assert "absent.jsonl: no such file" in refused(job(data=tmp_path / "absent.jsonl"), capsys, at_once=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_rows_is_one_line(job, tmp_path, capsys, text):
    (tmp_path / "data.jsonl").write_text(text)
    assert "data.jsonl has no rows" in refused(job(data=tmp_path / "data.jsonl"), capsys, at_once=True)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.parametrize("name", ["no-such-organisation/no-such-model", "./no/such/directory", "model.gguf"])
def test_an_unknown_model_is_one_line(job, tmp_path, capsys, name):
    assert repr(name) in refused(job(target=name), capsys, at_once=True)
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_a_tokenizer_is_one_line(job, tmp_path, capsys):
    target = save_tiny(tiny_llama(), tmp_path / "target")
    assert "cannot load the tokenizer of model" in refused(job(target=target), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_tokenizer_without_a_chat_template_is_one_line(job, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    target = save_target_dir(tmp_path / "target", tokenizer=tokenizer)
    assert "no chat template" in refused(job(target=target), capsys, at_once=True)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_place_that_holds_something_else_is_left_alone(job, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    before = states_of_files(tmp_path)
    line = refused(job("--resume", output=tmp_path), capsys, at_once=True)
    assert "holds something else (thesis.txt)" in line
    assert states_of_files(tmp_path) == before


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_place_that_is_a_file_is_left_alone(job, tmp_path, capsys, output):
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused(job(output=tmp_path / output), capsys, at_once=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_zarr_group_of_somebody_else_is_left_alone(job, tmp_path, capsys):
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    before = states_of_files(tmp_path)
    assert "is no dspark-store" in refused(job("--resume", output=tmp_path), capsys, at_once=True)
    assert states_of_files(tmp_path) == before


@pytest.mark.parametrize("size", ["", "two"])
def test_a_number_of_ranks_that_is_none_is_one_line(job, capsys, monkeypatch, size):
    for name, value in {"WORLD_SIZE": size, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    line = refused(job(), capsys, at_once=True)
    assert line.startswith(f"error: rank 1: the environment's WORLD_SIZE is {size!r}, not a whole number")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[1, 2]", "expected an object with messages"),
        (json.dumps({"text": "what"}), "messages"),
        (json.dumps({"messages": []}), "messages"),
        (json.dumps({"messages": [USER, {"role": "robot", "content": "beep"}]}), "'robot'"),
        (json.dumps({"messages": "what"}), "messages"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line_and_leaves_nothing(job, tmp_path, capsys, row, expected):
    data = write_rows(tmp_path / "data.jsonl", ["one", "two"])
    data.write_text(data.read_text() + "\n" + row + "\n")
    line = refused(job("--shuffle-seed", "none", data=data), capsys)
    assert f"{data}, line 4: " in line
    assert expected in line
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_a_store_whose_root_is_cut_off_is_refused(job, unfinished, capsys):
    root = unfinished / "zarr.json"
    root.write_bytes(root.read_bytes()[:100])
    before = states_of_files(unfinished)
    assert "zarr.json" in refused(job("--resume", output=unfinished), capsys, at_once=True, code=1)
    assert states_of_files(unfinished) == before


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["index/length/c.0", "ledger/tokens/c.0.0.0", "input_ids/c.0.0", "ledger/states/c.1.0.0"]
)
def test_a_damaged_object_that_is_needed_to_go_on_is_named(job, unfinished, capsys, name):
    (unfinished / "ledger" / "states" / "c.0.0.0").unlink()
    flip(unfinished / name)
    named = name.removesuffix("/c.0") if name.startswith("index") else name
    assert named in refused(job("--resume", output=unfinished), capsys, code=1)
    with pytest.raises(ValueError, match="incomplete"):
        ds.open_cache(unfinished)


@pytest.mark.parametrize("name", ["target_hidden_states/c.1.0.0", "target_hidden_states/c.2.0.1"])
def test_a_committed_object_whose_end_is_damaged_is_named_and_the_store_not_completed(job, unfinished, capsys, name):
    content = bytearray((unfinished / name).read_bytes())
    content[-1] ^= 1
    (unfinished / name).write_bytes(content)
    assert name in refused(job("--resume", output=unfinished), capsys, code=1)
    with pytest.raises(ValueError, match="incomplete"):
        ds.open_cache(unfinished)


def test_the_metadata_of_an_array_that_is_gone_is_written_again(job, unfinished, store):
    (unfinished / "loss_mask" / "zarr.json").unlink()
    assert main(job("--resume", output=unfinished)) == 0
    assert contents(unfinished) == contents(store)


@pytest.mark.parametrize(
    ("build", "missing"),
    [
        (lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL)), "cannot capture Lfm2Model: it has no final norm"),
        (
            lambda: T5ForConditionalGeneration(T5Config(**SMALL)),
            "transformers has no decoder that runs without an encoder",
        ),
        (lambda: ViTModel(ViTConfig(**SMALL)), "transformers has no language model head for it"),
    ],
    ids=["norm", "decoder", "head"],
)
def test_a_target_that_cannot_be_captured_is_refused_by_what_it_lacks(build, missing, job, no_target, tmp_path, capsys):
    target = save_target_dir(tmp_path / "target", build())
    line = refused(job("--target-model", target), capsys, at_once=True)
    assert missing in line
    assert "Config" not in line  # no list of classes
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
