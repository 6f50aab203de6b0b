"""A chat template that asks the clock is told one date, which the store keeps."""

import pytest

import dspark_store as ds
from dspark_store.cli.main import main as command
from dspark_store.cli.precompute import parse_arguments
from dspark_store.format.metadata import read_record
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute import tokenise as tokenise_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.job import plan_job
from tests.precompute.jobs import contents, interrupted, refused, rule_1, write_rows
from tests.tiny import tiny_tokenizer

_CHAT = tiny_tokenizer().chat_template
ASKING = "{{ strftime_now('%d %b %Y') }}" + _CHAT
WITH_TOOLS = "{% if tools %}{{ strftime_now('%d %b %Y') }}{% endif %}" + _CHAT
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
TOOL_ROW = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}], "tools": TOOLS}


@pytest.fixture
def on(monkeypatch):
    """Set the day that it is."""

    def set_day(day):
        monkeypatch.setattr("dspark_store.sources.registry.todays_date", lambda: day)

    set_day("2026-01-05")
    return set_day


@pytest.fixture
def asking(job):
    return lambda *flags, **options: job("--chat-template", ASKING, *flags, **options)


def source_of(output):
    return read_record(LocalStorage(output)).manifest["source"]


def texts(output):
    cache = ds.open_cache(output)
    tokenizer = tiny_tokenizer()
    return [tokenizer.decode(cache[row]["input_ids"][: cache.lengths[row]]) for row in range(len(cache))]


def test_a_resume_on_another_day_is_told_the_date_of_the_first_run(asking, on, chats, tmp_path):
    whole = tmp_path / "whole"
    assert main(asking(output=whole)) == 0
    assert source_of(whole)["template_date"] == "2026-01-05"
    assert all(text.startswith("05 Jan 2026<|") for text in texts(whole))
    output = interrupted(asking(), tokenise_module, "settle_tokens")
    (output / "ledger" / "tokens" / "c.1.0.0").unlink()
    on("2026-03-09")
    assert main(asking("--resume")) == 0
    assert contents(output) == contents(whole)


def test_worker_processes_are_told_the_same_date(asking, on, tmp_path):
    """They are other processes, for which it is another day."""
    assert main(asking("--num-workers", 2, output=tmp_path / "a")) == 0
    assert main(asking(output=tmp_path / "b")) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_date_can_be_given_and_is_part_of_the_identity(asking, on, capsys):
    output = interrupted(asking("--template-date", "2024-07-26"))
    assert source_of(output)["template_date"] == "2024-07-26"
    on("2026-03-09")
    assert "does not match this run in source.template_date: " in refused(
        asking("--resume", "--template-date", "2024-07-27"), capsys
    )
    assert main(asking("--resume")) == 0
    assert all(text.startswith("26 Jul 2024") for text in texts(output))


@pytest.mark.parametrize("flags", [(), ("--template-date", "2024-07-26")])
@pytest.mark.parametrize("template", [_CHAT, WITH_TOOLS])
def test_a_store_whose_template_is_never_made_to_ask_has_no_date(job, on, flags, template):
    planned = plan_job(parse_arguments(job("--chat-template", template, *flags)))
    assert "template_date" not in planned.source.identity()


def test_a_template_that_asks_for_some_rows_only_is_told_a_date(job, on, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", [*["a"] * 6, {"broken": 1}, TOOL_ROW])
    flags = ("--chat-template", WITH_TOOLS, "--shuffle-seed", "none", "--on-bad-row", "skip", "--max-refused", 0.5)
    output = interrupted(job(*flags, data=data), tokenise_module, "settle_tokens")
    on("2026-03-09")
    (output / "ledger" / "tokens" / "c.1.0.0").unlink()
    assert main(job(*flags, "--resume", data=data)) == 0
    assert source_of(output)["template_date"] == "2026-01-05"
    assert [text.startswith("05 Jan 2026") for text in texts(output)] == [False] * 6 + [True]


def test_a_resume_of_a_store_without_a_date_does_not_look_for_rows_that_ask(job, on, monkeypatch):
    flags = ("--chat-template", WITH_TOOLS)
    interrupted(job(*flags), tokenise_module, "settle_tokens")
    monkeypatch.setattr("dspark_store.sources.encode.Encoder.asks_clock", None)
    assert main(job(*flags, "--resume")) == 0


def test_parts_of_a_blend_may_have_other_dates(asking, on, chats, tmp_path):
    more = write_rows(tmp_path / "more.jsonl", ["x", "y"])
    data = f"[{{source: {chats}}}, {{source: {{type: chat, path: {more}, template_date: 2020-02-02}}}}]"
    output = interrupted(asking(data=data), tokenise_module, "settle_tokens")
    on("2026-03-09")
    assert [part["template_date"] for part in source_of(output)["parts"]] == ["2026-01-05", "2020-02-02"]
    assert main(asking("--resume", data=data)) == 0
    assert {text[:11] for text in texts(output)} == {"05 Jan 2026", "02 Feb 2020"}


def test_a_store_from_before_dates_were_kept_is_gone_on_with(asking, on):
    with rule_1(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_store.sources.chat.ChatSource._asks_clock", lambda *given: False)
        output = interrupted(asking())
    assert main(asking("--resume")) == 0
    assert "template_date" not in source_of(output)


@pytest.mark.parametrize("date", ["2026-1-5", "20260105", "today", "2026-02-30"])
def test_what_is_no_date_is_refused(job, capsys, date):
    line = refused(job("--template-date", date), capsys)
    assert f"template_date is {date!r}; expected a date, YYYY-MM-DD" in line


def test_tokens_are_shown_with_todays_date_and_say_so(llama, on, chats, capsys):
    words = ["tokens", str(chats), "--tokenizer", str(llama), "--chat-template", ASKING, "--rows", "0"]
    assert command(words) == 0
    shown = capsys.readouterr().out
    assert "the chat template asks the clock, and is told today's date, 2026-01-05; " in shown
    assert "05 Jan 2026<|user|>" in shown
    assert command([*words, "--template-date", "2024-07-26"]) == 0
    shown = capsys.readouterr().out
    assert "asks the clock" not in shown
    assert "26 Jul 2024<|user|>" in shown


def test_a_comparison_goes_by_the_date_of_the_store(asking, on, capsys):
    output = interrupted(asking())
    on("2026-03-09")
    assert command(["tokens", "--compare", str(output), "--chat-template", ASKING]) == 0
    assert "0 of 11 samples (0.0%) would be others today" in capsys.readouterr().out


def test_a_date_may_stand_in_yaml_as_one(job, tmp_path):
    path = tmp_path / "date.yaml"
    path.write_text("template_date: 2024-07-26\n")
    config = parse_arguments(["-c", str(path), *job()])
    config.check()
    assert config.template_date == "2024-07-26"
