import pytest

from dspark_store.evaluate import main
from tests.precompute.jobs import precompute
from tests.tiny import save_target_dir, tiny_llama, write_chats
from tests.training.runs import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A loud target, the store of its states, and a draft trained from it."""
    directory = tmp_path_factory.mktemp("trained")
    model = tiny_llama()
    model.lm_head.weight.data *= 60
    target = save_target_dir(directory / "target", model)
    store = precompute(target, write_chats(directory / "chats.jsonl", 11), directory / "store")
    return target, store, run(directory / "draft", "--store", store, "--max-steps", 3, "--validation-fraction", 0.3)


def flags(trained, *more):
    target, store, draft = trained
    small = ("--samples", 2, "--max-new-tokens", 9, "--device", "cpu")
    return [str(word) for word in (draft, "--target-model", target, "--store", store, *small, *more)]


def test_the_command_tells_tokens_a_step_and_that_the_texts_are_the_targets_own(trained, capsys):
    assert main(flags(trained)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "tokens a step: 16 tokens in" in first
    assert second == "2 prompts: 0 texts differ from the target's own, 0 at a near tie"


def test_mistakes_end_in_one_line(trained, tmp_path, capsys):
    target, store, draft = trained
    for words, named in (
        (flags(trained, "--samples", 0), "samples must be >= 1, got 0"),
        (flags((target, store, tmp_path)), "has no checkpoint"),
        (flags((tmp_path / "none", store, draft)), "there is no such directory"),
    ):
        assert main(words) == 2
        text = capsys.readouterr().err
        assert named in text
        assert "Traceback" not in text
