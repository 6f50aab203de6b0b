"""Rows that cannot be used: refused at once, or left out, counted and told."""

import gzip
import json

import pytest

from dspark_store.cli.main import main
from dspark_store.sources import ChatSource, SourceError
from tests.sources.words import CHAT, open_chats, word_tokenizer, write_rows
from tests.tiny import tiny_tokenizer

GOOD = {"messages": CHAT}
DEEP = b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"


def bad_role(role):
    return {"messages": [{"role": role, "content": "a"}]}


def source(path, **options):
    return open_chats(path, word_tokenizer(), seq_length=24, **options)


@pytest.fixture
def mixed(tmp_path):
    rows = [GOOD, bad_role("x"), GOOD, {}, bad_role("y"), bad_role("z"), bad_role("w"), GOOD]
    return write_rows(tmp_path / "a.jsonl", *rows)


def test_skipped_rows_leave_their_places_free(mixed):
    samples = list(source(mixed, on_bad_row="skip", max_refused=1.0).read())
    assert [sample.cursor for sample in samples] == [1, 3, 8]
    rest = source(mixed, on_bad_row="skip", max_refused=1.0).read(samples[0].cursor)
    assert [sample.cursor for sample in rest] == [3, 8]


def test_the_report_counts_reasons_and_keeps_the_first_three_of_each(mixed):
    skipping = source(mixed, on_bad_row="skip", max_refused=1.0)
    tokens = sum(len(sample.input_ids) for sample in skipping.read())
    report = skipping.report()
    assert (report.read, report.kept, report.refused, report.samples, report.tokens) == (8, 3, 5, 3, tokens)
    assert sorted((refusals.count, len(refusals.examples)) for refusals in report.reasons.values()) == [(1, 1), (4, 3)]
    roles = [line for line in report.lines() if "messages[0].role" in line]
    assert [f"{mixed}, line {line}: " in shown for line, shown in zip((2, 5, 6), roles, strict=True)] == [True] * 3


def test_more_refused_rows_than_allowed_are_an_error(mixed):
    with pytest.raises(
        SourceError, match=r"line 4: .*with it 2 rows cannot be used, more than max_refused \(20.00% of 8"
    ):
        list(source(mixed, on_bad_row="skip", max_refused=0.2).read())


@pytest.mark.parametrize(("max_refused", "enough"), [(0.5, False), (0.625, True)])
def test_after_a_resume_the_rows_refused_before_count_too(mixed, max_refused, enough):
    """One of the five bad rows of eight was before."""
    skipping = source(mixed, on_bad_row="skip", max_refused=max_refused)
    skipping.resume(3, 2)
    if enough:
        assert [sample.cursor for sample in skipping.read(3)] == [8]
    else:
        with pytest.raises(SourceError, match=r"line 7: .*with it 5 rows cannot be used, more than .*50.00% of 8"):
            list(skipping.read(3))


def test_a_resume_is_not_refused_for_bad_rows_that_stand_together(mixed):
    skipping = source(mixed, on_bad_row="skip", max_refused=0.5, over_long="drop")
    skipping.resume(3, 2)  # whether the other one was refused or dropped is not known
    assert [sample.cursor for sample in skipping.read(3)] == [8]


def test_the_report_tells_what_was_cut_and_what_is_not_supervised(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", GOOD, {"messages": CHAT[:1]}, {"messages": CHAT[1:2]})
    short = ChatSource(path, word_tokenizer(), seq_length=10)
    list(short.read())
    assert (short.report().truncated, short.report().unsupervised, short.report().supervised) == (1, 1, 10)
    strict = open_chats(path, word_tokenizer(), seq_length=10, min_supervised=1)
    assert len(list(strict.read())) == 2
    assert strict.report().too_few_supervised == 1


LONE = (
    b'{"messages": [{"role": "user", "content": "hi \\ud83d there"}, '
    b'{"role": "assistant", "content": "\\ud83d\\ude00"}]}'
)


def test_lone_surrogates_are_refused_or_replaced_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LONE)
    tokenizer = tiny_tokenizer()
    with pytest.raises(SourceError, match="line 1: the row holds half of a surrogate pair"):
        list(ChatSource(path, tokenizer, seq_length=99).read())
    replacing = open_chats(path, tokenizer, seq_length=99, on_bad_row="skip")
    (sample,) = replacing.read()
    assert "hi \ufffd there" in tokenizer.decode(sample.input_ids)
    assert "\U0001f600" in tokenizer.decode(sample.input_ids)
    assert replacing.report().replaced == 1


def message(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "a", **fields}]}).encode()


MALFORMED = {
    "bad UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "byte 43 is not valid UTF-8"),
    "NUL bytes": (b"\x00" * 64, "not valid JSON"),
    "a NUL inside": (b'{"messages": "\x00"}', "not valid JSON"),
    "a line of 50 MB": (b'{"messages": "' + b"a" * 50_000_000 + b'"}', "more than 33,554,432 bytes"),
    "deep nesting": (DEEP, "JSON that cannot be read"),
    "duplicate keys": (b'{"messages": [], "messages": []}', "the key 'messages' stands twice"),
    "not a number": (b'{"messages": [{"role": "user", "content": NaN}]}', "NaN is no JSON number"),
    "a CSV": (b"role,content", "not valid JSON"),
    "half a line": (b'{"messages": [{"role": "us', "not valid JSON"),
    "two rows in a line": (b"{} {}", "not valid JSON (Extra data"),
    "no object": (b'"messages"', "the row is a JSON str, expected an object"),
    "no messages": (b'{"text": "a"}', "neither messages nor conversations; its keys are ['text']"),
    "messages of text": (b'{"messages": "a"}', "messages must be a list of at least one message"),
    "an unknown role": (message(role="critic"), "messages[0].role is 'critic'"),
    "a picture": (message(content=[{"type": "image_url"}]), "messages[0].content[0] must be a part of type 'text'"),
    "half a surrogate pair": (LONE, "half of a surrogate pair"),
    "an id out of range": (b'{"input_ids": [1, 100000]}', "input_ids[1] is 100000, expected 0 to"),
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return tiny_tokenizer().save_pretrained(tmp_path_factory.mktemp("tokenizer") / "it")[0].rpartition("/")[0]


@pytest.mark.parametrize(("line", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_row_is_one_line_that_names_file_and_row(tmp_path, tokenizer_folder, capsys, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    assert main(["tokens", str(path), "--tokenizer", tokenizer_folder]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert f"{path}, line 3: " in error
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 600


def gzip_cut(path):
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])


FILES = {
    "a.jsonl.gz": (gzip_cut, "the gzip stream ends early"),
    "a.json": (lambda path: path.write_text("role,content\nuser,hi\n"), "not valid JSON"),
    "b.json": (lambda path: path.write_text("[" * 2_000 + "]" * 2_000), "JSON that cannot be read"),
    "c.json": (lambda path: path.write_text("[]"), "has no rows"),
    "a.jsonl": (lambda path: path.write_bytes(b"\n \n"), "has no rows"),
    "a.parquet": (lambda path: path.write_text("role,content\nuser,hi\n"), "cannot be read as parquet"),
    "b.parquet": (lambda path: path.write_bytes(b""), "cannot be read as parquet"),
}


@pytest.mark.parametrize(("name", "write", "message"), [(name, *case) for name, case in FILES.items()], ids=FILES)
def test_a_malformed_file_is_one_line_that_names_it(tmp_path, tokenizer_folder, capsys, name, write, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    write(tmp_path / name)
    assert main(["tokens", str(tmp_path / name), "--tokenizer", tokenizer_folder]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / name}")
    assert message in error
    assert error.count("\n") == 1
