"""Rows as people have them: in other shapes, under other names, and with keys that change the text or the mask."""

import json
import logging

import pytest

from dspark_store.cli.main import main
from dspark_store.sources import SourceError
from dspark_store.sources.messages import read_conversation
from dspark_store.sources.options import ChatOptions, check_template_kwargs, options_of
from dspark_store.sources.registry import SourceContext, SpecValue, build_source, parse_source
from tests.sources.words import CHAT, PLAIN, WORDS, open_chats, word_tokenizer, write_rows
from tests.tiny import tiny_tokenizer

USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "w1 w2"}
ROW = "<s> {{ m.role }} {{ m.content }} </s> "
REFUSING = "{% for m in messages %}{{ raise_exception('no') if m.role == 'ROLE' }}" + ROW + "{% endfor %}"
VARIABLE = PLAIN + "{{ mood or 'r1' }} {{ other or 'r2' }}"


def words(path, template=PLAIN, **options):
    """Return the words of each sample, those that are supervised in brackets."""
    source = open_chats(path, word_tokenizer(template), seq_length=99, **options)
    return [
        " ".join(f"[{WORDS[i]}]" if bit else WORDS[i] for i, bit in zip(s.input_ids, s.loss_mask, strict=True))
        for s in source.read()
    ]


def messages_of(row):
    return read_conversation(row).messages


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "response": "yo"},
        {"prompt": "hi", "completion": "yo", "response": None},
        {"prompt": [USER], "completion": [SAID]},
        {"prompt": [USER], "response": "yo"},
        {"instruction": "hi", "output": "yo"},
        {"instruction": "hi", "input": "", "output": "yo"},
        {"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "yo"}]},
    ],
)
def test_every_shape_of_a_row_is_the_same_conversation(row):
    assert messages_of(row) == [USER, SAID]


def test_the_input_of_an_instruction_follows_it_on_a_line_of_its_own():
    row = {"instruction": "hi", "input": "there", "output": "yo"}
    assert messages_of(row) == [{"role": "user", "content": "hi\nthere"}, SAID]


def test_messages_count_before_any_other_shape():
    assert messages_of({"prompt": "hi", "response": "no", "messages": [USER, SAID]}) == [USER, SAID]


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a"}, {"prompt": "a", "chosen": "b"}, {"instruction": "a"}])
def test_a_row_of_no_shape_is_shown_those_that_are_taken(row):
    with pytest.raises(SourceError, match=r"its keys are .*; expected messages, conversations, prompt and response, "):
        read_conversation(row)


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_what_a_row_says_to_the_system_begins_its_conversation(field):
    assert messages_of({"system": "w1 w2", field: [USER, SAID]}) == [SYSTEM, USER, SAID]
    assert messages_of({"system": "w1 w2", field: [SYSTEM, USER, SAID]}) == [SYSTEM, USER, SAID]
    assert messages_of({"system": "", field: [SYSTEM, USER]}) == messages_of({field: [SYSTEM, USER]})
    with pytest.raises(SourceError, match=r"system is 'w3', and the conversation begins with another .* 'w1 w2'"):
        read_conversation({"system": "w3", field: [SYSTEM, USER, SAID]})


def test_the_system_of_a_row_is_part_of_its_text(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", {"system": "w1", "conversations": [{"from": "human", "value": "hi"}]})
    assert words(path) == ["<s> system w1 </s> <s> user hi </s>"]


@pytest.mark.parametrize(
    ("key", "learned"),
    [
        *((key, False) for key in ({"weight": 0}, {"weight": 0.0}, {"loss": 0}, {"loss": False}, {"train": False})),
        *((key, True) for key in ({"weight": 1}, {"loss": 1}, {"loss": True}, {"train": True}, {"weight": None})),
    ],
)
def test_messages_of_the_assistant_say_whether_they_are_to_be_learned(key, learned):
    chat = [{**USER, "weight": 0.5}, {**SAID, **key}, USER, SAID]
    assert read_conversation({"messages": chat}).supervised == [False, learned, False, True]


@pytest.mark.parametrize("key", [{"weight": 0.5}, {"weight": 2}, {"weight": "0"}, {"loss": "no"}, {"train": []}])
def test_a_weight_that_is_neither_0_nor_1_is_a_bad_row(key):
    with pytest.raises(SourceError, match=r"of message 1 is .*; expected 0 or 1"):
        read_conversation({"messages": [USER, {**SAID, **key}]})


@pytest.mark.parametrize(
    ("row", "ended"),
    [
        ({}, True),
        ({"ended": True}, True),
        ({"ended": False}, False),
        ({"ended": None}, True),
        ({"finish_reason": "length"}, False),
        ({"finish_reason": "stop"}, True),
        ({"ended": True, "finish_reason": "length"}, False),
    ],
)
def test_a_row_says_whether_its_last_answer_ended_by_itself(row, ended):
    assert read_conversation({"messages": [USER, SAID], **row}).ended is ended


def test_variables_of_a_row_win_over_those_of_the_job_key_by_key(tmp_path):
    rows = [{"messages": [USER]}, {"messages": [USER], "chat_template_kwargs": {"mood": "r3"}}]
    rows.append({"messages": [USER], "chat_template_kwargs": '{"other": "w3"}'})
    path = write_rows(tmp_path / "chats.jsonl", *rows)
    start = "<s> user hi </s>"
    assert words(path, VARIABLE) == [f"{start} r1 r2", f"{start} r3 r2", f"{start} r1 w3"]
    given = {"mood": "w1", "other": "w2"}
    assert words(path, VARIABLE, chat_template_kwargs=given) == [f"{start} w1 w2", f"{start} r3 w2", f"{start} w1 w3"]


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "documents", "return_tensors"),
        *("continue_final_message", "padding", "truncation", "max_length", "bos_token", "eos_token"),
    ],
)
def test_variables_that_templates_are_given_anyway_are_refused(name):
    with pytest.raises(SourceError, match=f"chat_template_kwargs of the row has '{name}', which is given"):
        read_conversation({"messages": [USER], "chat_template_kwargs": {name: 1}})
    with pytest.raises(SourceError, match=f"here has '{name}'"):
        check_template_kwargs({name: 1}, "here")


def test_the_parts_of_a_blend_may_have_other_variables_and_columns(tmp_path):
    one = write_rows(tmp_path / "one.jsonl", {"messages": [USER]})
    other = write_rows(tmp_path / "other.jsonl", {"chat": [USER]})
    parts: list[SpecValue] = [{"type": "chat", "path": str(one), "chat_template_kwargs": {"mood": "w1"}}]
    parts.append({"type": "chat", "path": str(other), "columns": {"messages": "chat"}})
    context = SourceContext(
        seq_length=99, load_tokenizer=lambda: word_tokenizer(VARIABLE), chat_template_kwargs={"mood": "w2"}
    )
    read = [[WORDS[i] for i in sample.input_ids][-2] for sample in build_source(parse_source(parts), context).read()]
    assert sorted(read) == ["w1", "w2"]


def test_settings_that_are_given_are_part_of_the_identity_and_others_are_not(tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", {"messages": CHAT, "text": "a"})
    plain = open_chats(path, word_tokenizer(), seq_length=9).identity()
    assert not {"columns", "chat_template_kwargs", "text_column"} & set(plain)
    for given in ({"chat_template_kwargs": {"mood": "w1"}}, {"columns": {"messages": "text"}}, {"text_column": "text"}):
        identity = open_chats(path, word_tokenizer(), seq_length=9, **given).identity()
        assert identity == {**plain, **given}
        json.dumps(identity)


def test_other_names_of_columns_are_given_as_words_or_as_a_mapping():
    words_of = ChatOptions(columns=["messages=chat", "tools=a=b"])  # type: ignore[arg-type] # as flags give it
    assert options_of(words_of).columns == {"messages": "chat", "tools": "a=b"}
    assert options_of(ChatOptions(columns={"messages": "chat"})).columns == {"messages": "chat"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["messages"]}, "columns: 'messages' is no name=column"),
        ({"columns": {"message": "chat"}}, "columns: 'message' is none of .*; the nearest is 'messages'"),
        ({"columns": {"messages": ""}}, "columns: messages is ''; expected the name of a column"),
        ({"columns": 3}, "columns is 3; expected a mapping"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs is '{', which is not JSON"),
        ({"chat_template_kwargs": "[]"}, r"chat_template_kwargs must be an object of variables, got \[\]"),
        ({"chat_template_kwargs": {"a": {1, 2}}}, "chat_template_kwargs must be JSON"),
    ],
)
def test_an_option_that_cannot_be_says_what_is_expected(options, message):
    with pytest.raises(SourceError, match=message):
        options_of(ChatOptions(**options))


@pytest.fixture
def tables(tmp_path):
    """Write rows in every kind of file, and return where."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")

    def write(*rows):
        table = pa.Table.from_pylist(list(rows))
        pq.write_table(table, tmp_path / "rows.parquet")
        datasets.Dataset(table).save_to_disk(tmp_path / "saved")
        return [write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "rows.parquet", tmp_path / "saved"]

    return write


def test_columns_of_other_names_are_read_in_every_kind_of_file(tables):
    paths = tables({"chat": [USER, SAID], "said": "w1"}, {"chat": [USER], "said": None})
    columns = {"messages": "chat", "system": "said"}
    expected = ["<s> system w1 </s> <s> user hi </s> [<s>] [assistant] [yo] [</s>]", "<s> user hi </s>"]
    for path in paths:
        assert words(path, columns=columns) == expected
    for path in paths:
        with pytest.raises(SourceError, match=r"(keys are|columns) .*chat"):
            words(path)
    for path in paths[1:]:
        with pytest.raises(SourceError, match="has the columns chat, said; expected 'chats', which was named"):
            words(path, columns={"messages": "chats"})


def test_a_column_of_text_is_that_text_with_what_the_tokenizer_adds_and_all_of_it_is_supervised(tables):
    paths = tables({"text": "hi there", "messages": [USER]}, {"text": "yo", "messages": None})
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    expected = [tokenizer("hi there")["input_ids"], tokenizer("yo")["input_ids"]]
    for path in paths:
        samples = list(open_chats(path, tokenizer, seq_length=99, text_column="text").read())
        assert [sample.input_ids.tolist() for sample in samples] == expected
        assert all(sample.loss_mask.all() for sample in samples)


def test_the_special_tokens_that_a_tokenizer_adds_by_itself_are_in_a_text(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    path = write_rows(tmp_path / "texts.jsonl", {"text": "hi there"})
    (sample,) = open_chats(path, tokenizer, seq_length=9, text_column="text").read()
    assert [WORDS[index] for index in sample.input_ids] == ["<s>", "hi", "there", "</s>"]
    assert sample.loss_mask.tolist() == [1, 1, 1, 1]


def test_a_row_without_its_text_is_a_bad_row(tmp_path):
    path = write_rows(tmp_path / "texts.jsonl", {"text": None, "id": 1})
    with pytest.raises(SourceError, match=r"line 1: text, which text_column names, is None; expected text; keys"):
        words(path, text_column="text")


def test_keys_that_are_not_read_are_told_once_and_counted(tables, caplog):
    row = {"messages": [USER], "rating": 3, "notes": {"a": "b"}, "id": "x"}
    paths = tables(row, {**row, "rating": None}, {**row, "notes": None}, {"messages": [USER]})
    for path in paths:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            source = open_chats(path, word_tokenizer(), seq_length=9)
            list(source.read())
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 2
        assert any("'rating' is not read" in line for line in told)
        assert sorted(count for note, count in source.report().notes.items()) == [2, 2]
        assert [line for line in source.report().lines() if "is not read: 2 rows" in line]


def test_a_report_counts_keys_that_are_not_read(tmp_path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path / "it")
    path = write_rows(tmp_path / "chats.jsonl", *[{"messages": [USER], "rating": 3, "source": "a"}] * 3)
    assert main(["tokens", str(path), "--tokenizer", str(tmp_path / "it"), "--report"]) == 0
    printed = capsys.readouterr().out
    assert "key 'rating' is not read: 3 rows" in printed
    assert "'source'" not in printed


def test_messages_that_a_template_drops_are_told(tmp_path, caplog):
    quiet = "{% for m in messages if m.role != 'developer' %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
    path = write_rows(tmp_path / "chats.jsonl", {"messages": [{"role": "developer", "content": "w1"}, USER]})
    with caplog.at_level(logging.WARNING):
        assert words(path, quiet) == ["<s> user hi </s>"]
    assert "leaves out messages of the role developer" in caplog.text
    with pytest.raises(SourceError, match="the chat template refuses the conversation: no"):
        words(path, REFUSING.replace("ROLE", "developer"))


def test_several_system_messages_are_as_the_template_takes_them(tmp_path):
    path = write_rows(
        tmp_path / "chats.jsonl", {"messages": [SYSTEM, USER, SAID, {"role": "system", "content": "w3"}, USER]}
    )
    first = "<s> system w1 w2 </s> <s> user hi </s> [<s>] [assistant] [yo] [</s>]"
    assert words(path) == [f"{first} <s> system w3 </s> <s> user hi </s>"]
    developer = {"messages": [{"role": "developer", "content": "w3"}, USER]}
    both = REFUSING.replace("== 'ROLE'", "in ['system', 'developer']")
    assert words(write_rows(tmp_path / "developer.jsonl", developer), both) == ["<s> user w3 hi </s>"]
    assert words(path, REFUSING.replace("ROLE", "system")) == [
        "<s> user w1 w2 hi </s> [<s>] [assistant] [yo] [</s>] <s> user w3 hi </s>"
    ]


def test_a_folder_of_json_lines_is_all_of_them(tmp_path):
    for name, word in (("b.jsonl", "yo"), ("a.jsonl", "hi"), ("c.ndjson", "ok")):
        write_rows(tmp_path / name, {"messages": [{"role": "user", "content": word}]})
    (tmp_path / "README.md").write_text("no rows")
    assert words(tmp_path) == [f"<s> user {word} </s>" for word in ("hi", "yo", "ok")]
    (tmp_path / "d.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match="has both parquet files and JSON Lines; say which by a glob"):
        words(tmp_path)


def test_an_empty_folder_says_what_it_should_hold(tmp_path):
    with pytest.raises(SourceError, match="is a directory without parquet files or JSON Lines"):
        words(tmp_path)


def test_what_is_not_to_be_learned_stays_so_where_system_messages_are_folded(tmp_path):
    other = {"role": "system", "content": "w3"}
    row = {"messages": [SYSTEM, USER, {**SAID, "weight": 0}, other, USER, SAID], "ended": True}
    path = write_rows(tmp_path / "chats.jsonl", row)
    said = "[<s>] [assistant] [yo] [</s>]"
    unsaid = said.replace("[", "").replace("]", "")
    folded = f"<s> user w1 w2 hi </s> {unsaid} <s> user w3 hi </s> {said}"
    assert words(path, REFUSING.replace("ROLE", "system")) == [folded]
