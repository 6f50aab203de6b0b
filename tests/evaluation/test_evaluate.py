import logging
import shutil

import pytest
import torch

from dspark_store.evaluate import main
from dspark_store.evaluation import trial
from dspark_store.evaluation.decoder import Greedy, Speculated
from dspark_store.evaluation.trial import NEAR, Judgement, compare, prompts_of
from dspark_store.readers.cache import open_cache
from tests.precompute.jobs import precompute
from tests.stores import build_store
from tests.tiny import save_target_dir, tiny_llama, tiny_qwen3, write_chats
from tests.training.runs import run


def loud_llama(seed=0):
    model = tiny_llama(seed)
    model.lm_head.weight.data *= 60
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A loud target, the store of its states, and a draft trained from it."""
    directory = tmp_path_factory.mktemp("trained")
    target = save_target_dir(directory / "target", loud_llama())
    store = precompute(target, write_chats(directory / "chats.jsonl", 11), directory / "store")
    return target, store, run(directory / "draft", "--store", store, "--max-steps", 3, "--validation-fraction", 0.3)


def flags(trained, *more):
    target, store, draft = trained
    small = ("--samples", 2, "--max-new-tokens", 9, "--device", "cpu")
    return [str(word) for word in (draft, "--target-model", target, "--store", store, *small, *more)]


def refused(words, capsys):
    """Run a command that must be refused; return its line."""
    capsys.readouterr()
    assert main(words) == 2
    text = capsys.readouterr().err
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in text
    return line


def test_the_command_tells_tokens_a_step_and_that_the_texts_are_the_targets_own(trained, capsys):
    assert main(flags(trained)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "tokens per step: 16 tokens in" in first
    assert second == "2 prompts: 0 texts differ from the target's own, 0 at a near tie"


def test_texts_that_differ_end_with_exit_code_1(trained, capsys, monkeypatch):
    monkeypatch.setattr(trial, "evaluate", lambda config: Judgement(prompts=2, tokens=16, steps=8, differing=1))
    assert main(flags(trained)) == 1
    assert "2 prompts: 1 texts differ from the target's own" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_no_error(trained, capsys, dtype):
    assert main(flags(trained, "--dtype", dtype)) == 0
    assert "2 prompts: 0 texts differ from the target's own" in capsys.readouterr().out


def test_at_a_temperature_there_is_no_text_to_compare_with(trained, capsys):
    first, second = told(trained, capsys, "--temperature", 1.5)
    assert "tokens per step: 16 tokens in" in first
    assert second == "2 prompts: drawn at temperature 1.5"
    assert told(trained, capsys, "--temperature", 1.5) == [first, second]


def told(trained, capsys, *more):
    assert main(flags(trained, *more)) == 0
    return capsys.readouterr().out.splitlines()


def test_mistakes_end_in_one_line(trained, tmp_path, capsys):
    target, store, draft = trained
    for words, named in (
        (flags(trained, "--samples", 0), "samples must be >= 1, got 0"),
        (flags(trained, "--seed", 2**64), "expected 0 to 2**64 - 1"),
        (flags(trained, "--temperature", -1), "temperature is -1.0, expected a finite number, 0 or more"),
        (flags((target, store, tmp_path)), "has no checkpoint"),
        (flags((tmp_path / "none", store, draft)), "there is no such directory"),
    ):
        assert named in refused(words, capsys)


def test_another_target_than_the_stores_is_refused(trained, tmp_path, capsys):
    _, store, draft = trained
    other = save_target_dir(tmp_path / "other", tiny_qwen3())
    assert "target_model_type of the store is 'llama', this run expects 'qwen3'" in refused(
        flags((other, store, draft)), capsys
    )


def test_a_store_of_other_weights_than_the_drafts_is_refused(trained, tmp_path, capsys):
    other = save_target_dir(tmp_path / "other", loud_llama(seed=3))
    store = precompute(other, write_chats(tmp_path / "chats.jsonl", 11), tmp_path / "store")
    assert "the draft was trained on a target with weights" in refused(flags((other, store, trained[2])), capsys)


def test_a_store_without_the_drafts_layers_is_refused(trained, tmp_path, capsys):
    target, _, draft = trained
    few = precompute(
        target, write_chats(tmp_path / "chats.jsonl", 11), tmp_path / "store", "--target-layer-ids", "1", "3"
    )
    assert "layer 2 was not captured" in refused(flags((target, few, draft)), capsys)


def test_other_files_of_the_weights_are_a_warning(trained, tmp_path, caplog):
    _, store, draft = trained
    other = save_target_dir(tmp_path / "other", loud_llama(seed=3))
    with caplog.at_level(logging.WARNING):
        main(flags((other, store, draft)))
    assert "the store was made from other files than" in caplog.text


def test_without_validation_samples_there_is_a_warning(trained, tmp_path, caplog):
    target, store, _ = trained
    draft = run(tmp_path / "draft", "--store", store, "--max-steps", 1)
    with caplog.at_level(logging.WARNING):
        assert main(flags((target, store, draft))) == 0
    assert "the training kept no samples for validation" in caplog.text


def test_without_prompts_there_is_nothing_to_judge(trained, capsys, monkeypatch):
    monkeypatch.setattr(trial, "prompts_of", lambda cache, samples: iter(()))
    assert "there are no prompts" in refused(flags(trained), capsys)


@pytest.mark.parametrize("name", ["draft.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_not_tried_out(trained, tmp_path, capsys, name):
    target, store, draft = trained
    copy = shutil.copytree(draft, tmp_path / "draft")
    path = copy / "checkpoints" / "step-00000003" / name
    content = bytearray(path.read_bytes())
    content[-12] ^= 1
    path.write_bytes(content)
    assert main(flags((target, store, copy))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"{path.parent} is damaged: {name} is not what was written" in line


OWN = Greedy([4, 5, 6, 7], [1.0, 1.0, 1e-5, 1.0])


@pytest.mark.parametrize(
    ("tokens", "near", "differing"),
    [([4, 5, 6, 7], 0, 0), ([4, 5, 9, 9], 1, 0), ([4, 9, 6, 7], 0, 1), ([4, 5, 6], 1, 0), ([4, 5], 0, 1)],
)
def test_a_text_that_leaves_the_targets_own_is_counted_by_how_near_the_tie_was(tokens, near, differing):
    judgement = compare(OWN, Speculated(tokens, 2))
    assert (judgement.near_ties, judgement.differing) == (near, differing)


@pytest.mark.parametrize(("near_tie", "near"), [(1e-4, 0), (0.5, 0), (1.5, 1)])
def test_how_near_a_tie_is_depends_on_what_the_target_computes_in(near_tie, near):
    judgement = compare(OWN, Speculated([4, 9, 6, 7], 2), near_tie)
    assert (judgement.near_ties, judgement.differing) == (near, 1 - near)
    assert NEAR[torch.float32] == 1e-4 < NEAR[torch.float16] < NEAR[torch.bfloat16]


def test_judgements_add_up_before_they_are_divided():
    total = compare(OWN, Speculated([4, 5, 6, 7], 1)) + compare(OWN, Speculated([4, 5, 6, 7], 3))
    assert total == Judgement(prompts=2, tokens=6, steps=4)
    assert (total.tokens_per_step, Judgement().tokens_per_step) == (1.5, 0.0)


def test_a_prompt_is_what_stands_before_the_first_supervised_token(tmp_path):
    store = build_store(tmp_path / "store")
    cache = open_cache(store.path)
    expected = []
    for sample in store.samples:
        supervised = sample.mask.nonzero()[0]
        if supervised.size and supervised[0] > 0:
            expected.append(sample.ids[: supervised[0]].tolist())
    assert list(prompts_of(cache, range(len(cache)))) == expected
    assert expected
