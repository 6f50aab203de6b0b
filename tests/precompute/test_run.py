"""The command from start to finish: a new store, a resumed one, a refused one, and what the user is told."""

import os
import subprocess
import sys

import pytest
import torch
import yaml

import dspark_store as ds
from dspark_store.format.metadata import has_store, read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.writers.tokens import write_token_shard
from tests.precompute.jobs import (
    LENGTH,
    answers,
    arguments,
    contents,
    differing_samples,
    precompute,
    refused,
    write_rows,
)
from tests.tiny import (
    save_target_dir,
    tiny_llama,
    tiny_mistral3,
    tiny_qwen2_5_vl,
    tiny_qwen3_vl,
    tiny_tokenizer,
)


def test_a_new_store_has_no_problem_and_no_leftover(store):
    assert ds.verify_store(ds.open_cache(store)) == []
    assert list(LocalStorage(store).temporaries()) == []
    assert [path.name for path in store.iterdir() if path.name.startswith(".")] == []


def test_the_manifest_is_there_before_the_first_shard(llama, chats, tmp_path, monkeypatch):
    seen = []

    def spy(storage, *args):
        seen.append(has_store(storage) and not read_record(storage).complete)
        write_token_shard(storage, *args)

    monkeypatch.setattr(tokenise_module, "write_token_shard", spy)
    precompute(llama, chats, tmp_path / "store")
    assert seen == [True, True, True]


def test_the_number_of_encoders_does_not_change_a_byte(store, llama, chats, tmp_path):
    few = precompute(llama, chats, tmp_path / "store", "--encode-threads", 3, "--write-buffer-bytes", 1)
    assert contents(few) == contents(store)


@pytest.mark.parametrize("codec", ["none", "fast", "dense"])
def test_every_codec_keeps_every_value(store, llama, chats, tmp_path, codec):
    pytest.importorskip("pcodec" if codec == "dense" else "numcodecs")
    cache = ds.open_cache(precompute(llama, chats, tmp_path / "store", "--codec", codec))
    expected = ds.open_cache(store)
    assert cache.schema.codec == codec
    for sample in range(len(expected)):
        for key, values in expected[sample].items():
            assert torch.equal(cache[sample][key], values)


def test_the_shuffle_can_be_turned_off(llama, tmp_path):
    words = ["one", "two", "three", "four", "five"]
    data = write_rows(tmp_path / "data.jsonl", words)
    ordered = ds.open_cache(precompute(llama, data, tmp_path / "ordered", "--shuffle-seed", "none"))
    shuffled = ds.open_cache(precompute(llama, data, tmp_path / "shuffled", "--shuffle-seed", 1))
    assert answers(ordered, tiny_tokenizer()) == words
    assert answers(shuffled, tiny_tokenizer()) != words
    assert sorted(answers(shuffled, tiny_tokenizer())) == sorted(words)


def test_split_and_max_samples_take_rows_after_the_shuffle(store, llama, chats, tmp_path):
    some = precompute(llama, chats, tmp_path / "store", "--split", "train[2:9]", "--max-samples", 3)
    everything = answers(ds.open_cache(store), tiny_tokenizer())
    assert answers(ds.open_cache(some), tiny_tokenizer()) == everything[2:5]


def test_rows_without_a_supervised_token_are_kept_and_counted(llama, tmp_path, capsys):
    question = {"messages": [{"role": "user", "content": "nobody answers"}]}
    data = write_rows(tmp_path / "data.jsonl", ["one", question, "three", question])
    output = precompute(llama, data, tmp_path / "store", "--shuffle-seed", "none")
    assert [count > 0 for count in ds.open_cache(output).supervised] == [True, False, True, False]
    assert "2 samples have no supervised token" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value", "pad"), [("padding_side", "left", 0), ("pad_token", None, 1)])
def test_a_tokenizer_that_pads_left_changes_nothing_and_one_that_does_not_pad_pads_with_its_end(
    tmp_path, chats, name, value, pad
):
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, name, value)
    target = save_target_dir(tmp_path / "target", tokenizer=tokenizer)
    cache = ds.open_cache(precompute(target, chats, tmp_path / "store"))
    assert cache.pad_token_id == pad
    assert differing_samples(tiny_llama(), cache, pad_token_id=pad) == []


def test_the_report_says_what_is_stored_and_how_to_read_it(llama, chats, tmp_path, capsys):
    output = precompute(llama, chats, tmp_path / "store")
    printed = capsys.readouterr().out
    cache = ds.open_cache(output)
    assert f"11 samples, {int(cache.lengths.sum()):,} tokens" in printed
    assert f"dspark_store.open_cache({str(output)!r})" in printed
    assert printed.count(" of ragged bf16 rows of 4 vectors") == 2
    assert "note" not in printed


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """A target whose states at the letter Z are too large for fp16, and chats of which two have that letter."""
    directory = tmp_path_factory.mktemp("overflowing")
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.state_dict()["model.embed_tokens.weight"][tokenizer.convert_tokens_to_ids("Z")] = 1e6
    save_target_dir(directory / "target", model, tokenizer)
    return directory / "target", write_rows(directory / "data.jsonl", ["a", "b", "c", "d", "e", "fZ", "g", "Z", "i"])


def test_states_that_are_not_finite_are_marked_and_counted(overflowing, tmp_path, capsys):
    flags = ("--dtype", "fp16", "--shuffle-seed", "none")
    cache = ds.open_cache(precompute(*overflowing, tmp_path / "store", *flags))
    assert cache.status.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0]
    assert cache[5]["target_hidden_states"].isinf().any()
    assert cache[4]["target_hidden_states"].isfinite().all()
    assert "2 samples have states that are not finite in fp16" in capsys.readouterr().out
    assert ds.verify_store(cache) == []


def test_states_that_are_not_finite_can_end_the_run_which_then_can_go_on(overflowing, tmp_path, capsys):
    job = arguments(*overflowing, tmp_path / "store", "--dtype", "fp16", "--shuffle-seed", "none")
    line = refused([*job, "--on-nonfinite", "error"], capsys)
    assert "states of sample 5 are not finite in fp16" in line
    assert ds.existing_shard_indices(tmp_path / "store") == {0}
    assert main([*job, "--resume"]) == 0
    assert ds.open_cache(tmp_path / "store").status.sum() == 2


def test_the_command_runs_from_a_shell_with_a_yaml_file(store, llama, chats, tmp_path):
    settings = {
        "target_model": str(llama),
        "input_data": str(chats),
        "output_dir": "stores/new",
        "device": "cpu",
        "batch-size": 2,
        "shard-size": 4,
        "seq-length": LENGTH,
        "dtype": "bf16",
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "dspark_store.precompute", "-c", "job.yaml", "--dtype", "fp32"]
    root = str(ds.__path__[0]).removesuffix("/dspark_store")
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment(root))
    assert finished.returncode == 0, finished.stderr
    assert "open_cache('stores/new')" in finished.stdout
    assert "\r" not in finished.stderr
    assert "%|" not in finished.stderr  # no bar, of the libraries neither
    assert " capture: 100% (" in finished.stderr
    assert contents(tmp_path / "stores" / "new") == contents(store)


def _environment(root):
    return {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}


def test_a_target_that_cannot_run_as_asked_leaves_nothing_behind(llama, chats, tmp_path, capsys):
    store = tmp_path / "store"
    wrong = arguments(llama, chats, store, "--target-attn-implementation", "no_such_attention")
    assert main(wrong) == 2
    assert capsys.readouterr().err.count("\n") >= 1
    assert not store.exists()
    assert main(arguments(llama, chats, store)) == 0


def test_a_smoke_test_of_states_that_are_never_finite_fails(chats, tmp_path, capsys):
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.mul_(1e38)
    target = tmp_path / "target"
    save_target_dir(target, model, tiny_tokenizer("tagged"))
    assert main(arguments(target, chats, tmp_path / "store", "--smoke", "2", "--dtype", "fp16")) == 2
    assert "no sample is finite in fp16" in capsys.readouterr().err


@pytest.mark.parametrize("build", [tiny_qwen2_5_vl, tiny_qwen3_vl, tiny_mistral3])
def test_a_target_that_sees_images_is_run_over_chats(build, chats, tmp_path):
    model = build()
    target = save_target_dir(tmp_path / "target", model)
    cache = ds.open_cache(precompute(target, chats, tmp_path / "store", "--target-layer-ids", "-1", "1", "3"))
    assert (cache.target_config or {})["model_type"] == model.config.get_text_config().model_type
    for sample in range(len(cache)):
        length = int(cache.lengths[sample])
        ids = cache[sample]["input_ids"][None, :length]
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer] for layer in (0, 2, 4)], dim=-1)[0]
        torch.testing.assert_close(cache[sample]["target_hidden_states"][:length], expected)
    assert torch.equal(cache.weights().head, model.lm_head.weight)
