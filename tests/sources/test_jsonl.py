import hashlib
from contextlib import closing
from pathlib import Path

import pytest

from dspark_store.sources.files import open_rows
from dspark_store.sources.rows import parse_row
from dspark_store.sources.source import SourceError
from tests.sources.words import write_rows


def rows_of(path: Path) -> list[object]:
    with closing(open_rows(path)) as rows:
        return [parse_row(text)[0] for text in rows.take(range(len(rows)))]


def test_every_line_is_a_row(tmp_path):
    assert rows_of(write_rows(tmp_path / "a.jsonl", {"a": 1}, {"a": 2})) == [{"a": 1}, {"a": 2}]


def test_rows_are_read_in_any_order(tmp_path):
    with closing(open_rows(write_rows(tmp_path / "a.ndjson", *({"a": index} for index in range(5))))) as rows:
        assert [parse_row(text)[0]["a"] for text in rows.take([4, 0, 4])] == [4, 0, 4]


def test_blank_lines_are_skipped_but_counted_in_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"a": 1}\n \t\n\n{"a": 2}\n{"a": 3}\n\n')
    rows = open_rows(path)
    assert len(rows) == 3
    assert [rows.where(row) for row in range(3)] == [f"{path}, line {line}" for line in (2, 5, 6)]
    assert rows_of(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_the_last_line_needs_no_newline_and_lines_may_end_as_on_windows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}')
    assert rows_of(path) == [{"a": 1}, {"a": 2}]


def test_unicode_line_separators_do_not_end_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\u2028y\x85z"}\n{"a": 2}\n', encoding="utf-8")
    assert rows_of(path) == [{"a": "x\u2028y\x85z"}, {"a": 2}]


def test_a_json_list_is_its_rows_and_an_object_is_one_row(tmp_path):
    (tmp_path / "list.json").write_text('[{"a": "\u2028"},\n {"a": 2}]', encoding="utf-8")
    (tmp_path / "object.json").write_text('{"a": 1}')
    assert rows_of(tmp_path / "list.json") == [{"a": "\u2028"}, {"a": 2}]
    assert rows_of(tmp_path / "object.json") == [{"a": 1}]
    assert open_rows(tmp_path / "list.json").where(1) == f"{tmp_path / 'list.json'}, row 2"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_the_content_hash_is_that_of_the_bytes(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b'{"a": 1}  \n')
    assert open_rows(path).content_sha256 == hashlib.sha256(b'{"a": 1}  \n').hexdigest()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl: no such file"):
        open_rows(tmp_path / "missing.jsonl")


def test_a_directory_is_no_file_of_rows(tmp_path):
    with pytest.raises(SourceError, match="is a directory without parquet"):
        open_rows(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", ""), ("a.json", "[]")])
def test_a_file_without_rows_is_an_error(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match="has no rows"):
        open_rows(tmp_path / name)


def test_a_document_that_is_not_json_says_where(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(SourceError, match=r"a\.json: not valid JSON \(Extra data at line 2, column 1\).*\.jsonl"):
        open_rows(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": }', r"not valid JSON \(Expecting value at column 7\)"),
        (b'{"a": "\xff"}', "byte 7 is not valid UTF-8"),
        (b"[1]", "a JSON list, expected an object"),
        (b"null", "null, expected an object"),
        (b"[" * 200_000, "JSON that cannot be read"),
    ],
)
def test_a_bad_row_says_what_is_wrong(text, message):
    with pytest.raises(SourceError, match=message):
        parse_row(text)


def test_a_file_that_changed_is_not_read_by_stale_offsets(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"a": 1}, {"a": 2})
    rows = open_rows(path)
    write_rows(path, {"b": 1})
    with pytest.raises(SourceError, match="was changed"):
        rows.take([1])
