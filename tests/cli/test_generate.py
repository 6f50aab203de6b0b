"""``dspark-store generate``: chats in a target's own words."""

import json
import shutil

import pytest
import torch

from dspark_store.cli.generate import prompt_ids
from dspark_store.cli.main import main
from dspark_store.sources.limits import RenderLimits
from dspark_store.sources.rendering import Renderer
from dspark_store.target.answers import Answerer, Sampling
from dspark_store.target.load import load_target, load_tokenizer
from dspark_store.target.source import TargetSource
from tests.tiny import save_target_dir, tiny_tokenizer

PROMPTS = ["What is a tide?", "Name a colour.", "Why?", "Tell me of bees, and of what they do all day.", "Stop."]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target_dir(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


def generate(prompts, target, output, *more):
    given = ["--target-model", str(target), "--output", str(output), "--device", "cpu"]
    return main(["generate", str(prompts), *given, "--max-new-tokens", "12", "--batch-size", "2", *more])


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_prompt_gets_an_answer(prompts, target, tmp_path, capsys):
    assert generate(prompts, target, tmp_path / "chats.jsonl") == 0
    written = rows(tmp_path / "chats.jsonl")
    assert [row["messages"][0]["content"] for row in written] == PROMPTS
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in written)
    assert "5 chats" in capsys.readouterr().out


def test_at_temperature_0_an_answer_is_the_likeliest_tokens_whatever_shares_its_batch(target):
    source = TargetSource(str(target))
    model = load_target(source, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(source)
    answerer = Answerer(model, tokenizer, Sampling(max_new_tokens=6, temperature=0))
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS[:3]]
    encoded = tokenizer.apply_chat_template(conversations[2], add_generation_prompt=True, return_dict=True)
    ids = list(encoded["input_ids"])  # type: ignore[call-overload, index] # a mapping, as asked
    said: list[int] = []
    while len(said) < 6 and tokenizer.eos_token_id not in said:
        said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
    text = str(tokenizer.decode([token for token in said if token != tokenizer.eos_token_id], skip_special_tokens=True))
    prompts = [prompt_ids(Renderer(tokenizer), chat, number) for number, chat in enumerate(conversations, 1)]
    assert prompts[2] == ids
    assert answerer.answer(prompts, 0)[2].text == text.strip()


COUNTS = "{% for n in range(m.content | int) %}{% for k in range(99999) %}{{ SAID }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("said", "limits", "message"),
    [
        ("''", RenderLimits(seconds=0.2), "prompt 7: the chat template takes more than 0.2 s of processor time"),
        ("'x'", RenderLimits(text_bytes=2**16), "prompt 7: the chat template writes more than 65,536 bytes"),
        ("raise_exception('not so')", RenderLimits(), "prompt 7: the chat template refuses the conversation: not so"),
    ],
)
def test_a_template_that_does_not_end_with_a_prompt_or_refuses_it_is_an_error_that_names_it(said, limits, message):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}" + COUNTS.replace("SAID", said) + "{% endfor %}"
    with pytest.raises(ValueError, match=message):
        prompt_ids(Renderer(tokenizer, limits=limits), [{"role": "user", "content": "99999"}], 7)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_an_interrupted_run_goes_on_to_the_same_file(prompts, target, tmp_path, cut):
    generate(prompts, target, tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = whole.split(b"\n")
    half = tmp_path / "half.jsonl"
    half.write_bytes(b"\n".join(lines[:cut]) + b"\n" + (lines[cut][:9] if cut < 5 else b""))
    assert generate(prompts, target, half) == 0
    assert half.read_bytes() == whole


def test_another_seed_gives_other_answers(prompts, target, tmp_path):
    generate(prompts, target, tmp_path / "one.jsonl")
    generate(prompts, target, tmp_path / "two.jsonl", "--seed", "7")
    answers = [[row["messages"][-1]["content"] for row in rows(tmp_path / name)] for name in ("one.jsonl", "two.jsonl")]
    assert answers[0] != answers[1]


def test_messages_are_answered_in_the_place_of_the_answer_that_they_have(target, tmp_path):
    chat = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "Two?"},
    ]
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [*chat, {"role": "assistant", "content": "old"}]}) + "\n"
    )
    assert generate(tmp_path / "chats.jsonl", target, tmp_path / "new.jsonl") == 0
    (row,) = rows(tmp_path / "new.jsonl")
    assert row["messages"][:3] == chat[:3]
    assert len(row["messages"]) == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "7"], "was made with seed 42, not 7: give the same, or another --output"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--temperature", "-1"], "temperature must be >= 0, got -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--max-new-tokens", "0"], "max-new-tokens must be >= 1, got 0"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(prompts, target, tmp_path, capsys, more, message):
    output = tmp_path / "chats.jsonl"
    generate(prompts, target, output)
    before = output.read_bytes()
    assert generate(prompts, target, output, *more) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert output.read_bytes() == before


def test_a_file_that_answers_other_prompts_is_left_alone(prompts, target, tmp_path, capsys):
    output = tmp_path / "chats.jsonl"
    generate(prompts, target, output)
    before = output.read_bytes()
    prompts.write_text("Another question.\nAnd one more.\n")
    assert generate(prompts, target, output) == 2
    assert "chats.jsonl:1 does not answer" in capsys.readouterr().err
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', "is no row"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is no row"),
        ("no JSON", "is no row"),
        ('{"messages": [{"role": "user", "content": null}]}', "has a message whose content is no text"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}', "content is no text"),
    ],
)
def test_a_row_that_nothing_can_follow_is_named(target, tmp_path, capsys, line, message):
    (tmp_path / "chats.jsonl").write_text(line + "\n")
    assert generate(tmp_path / "chats.jsonl", target, tmp_path / "new.jsonl") == 2
    told = capsys.readouterr().err
    assert "chats.jsonl:1 " in told
    assert message in told


@pytest.mark.parametrize("text", ["my notes\n", "my notes", "one\ntwo\nthree\n", '{"messages": []}\n', "[1]\n"])
def test_a_file_that_generate_did_not_write_is_left_alone(prompts, target, tmp_path, capsys, text):
    output = tmp_path / "notes.txt"
    output.write_text(text)
    assert generate(prompts, target, output, "--batch-size", "16") == 2
    assert "give another --output" in capsys.readouterr().err
    assert output.read_text() == text


def test_a_target_that_is_not_there_leaves_a_begun_file_as_it_is(prompts, target, tmp_path):
    output = tmp_path / "chats.jsonl"
    generate(prompts, target, output)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]))
    origin = json.loads(lines[0])["generated"]["model"]
    shutil.move(target, tmp_path / "elsewhere")
    try:
        assert generate(prompts, origin, output) == 2
        assert output.read_bytes() == b"".join(lines[:3])
    finally:
        shutil.move(tmp_path / "elsewhere", target)


def test_a_line_separator_inside_a_message_ends_no_row(target, tmp_path):
    chat = {"messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat, ensure_ascii=False) + "\n", encoding="utf-8")
    assert generate(tmp_path / "chats.jsonl", target, tmp_path / "new.jsonl") == 0
    (line,) = (tmp_path / "new.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert json.loads(line)["messages"][0] == chat["messages"][0]
