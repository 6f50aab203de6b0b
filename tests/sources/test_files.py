import gzip
import hashlib
import json
import shutil
import tracemalloc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_store.sources import ChatSource, jsonl
from dspark_store.sources.files import LARGEST_DOCUMENT, open_rows
from dspark_store.sources.rows import parse_row, read_tokens
from dspark_store.sources.source import SourceError
from tests.sources.words import CHAT, word_tokenizer, write_rows

ROWS = [{"a": index} for index in range(5)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def numbers(data, order=None, **options):
    with closing(open_rows(data, **options)) as rows:
        return [parse_row(row)[0]["a"] for row in rows.take(order or range(len(rows)))]


def zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


PACKED = [("a.jsonl.gz", gzip.compress), ("a.ndjson.zst", zstd), ("a.jsonl.zstd", zstd), ("a.JSONL.GZ", gzip.compress)]


@pytest.mark.parametrize(("name", "pack"), PACKED)
def test_a_compressed_file_gives_the_rows_and_the_identity_of_the_plain_one(tmp_path, name, pack):
    plain = write_rows(tmp_path / "plain.jsonl", *ROWS)
    (tmp_path / name).write_bytes(pack(LINES))
    assert numbers(tmp_path / name, [4, 0, 2]) == [4, 0, 2]
    with closing(open_rows(tmp_path / name)) as rows, closing(open_rows(plain)) as same:
        assert rows.content_sha256 == same.content_sha256
        assert rows.where(1) == f"{tmp_path / name}, line 2"


@pytest.mark.parametrize(("name", "pack"), PACKED[:2])
def test_streams_that_follow_each_other_in_one_file_are_one(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(LINES[:20]) + pack(LINES[20:]))
    assert numbers(tmp_path / name) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("name", "pack"), PACKED[:2])
def test_a_compressed_file_that_is_cut_or_damaged_says_so(tmp_path, name, pack):
    data = pack(LINES)
    (tmp_path / name).write_bytes(data[:-6])
    with pytest.raises(SourceError, match=rf"{name}: the \w+ stream ends early"):
        open_rows(tmp_path / name)
    (tmp_path / name).write_bytes(data[:12] + b"\xff\xff\xff\xff\xff\xff" + data[18:])
    with pytest.raises(SourceError, match=rf"{name}: the \w+ stream (is damaged|ends early)"):
        open_rows(tmp_path / name)


@pytest.mark.parametrize(("name", "pack"), PACKED[:2])
def test_a_compressed_file_that_would_fill_a_disk_is_refused_in_bounded_memory(tmp_path, monkeypatch, name, pack):
    (tmp_path / name).write_bytes(pack(b"[" + b" " * 200_000_000))
    monkeypatch.setattr(jsonl, "LEAST_LIMIT", 1_000_000)
    tracemalloc.start()
    with pytest.raises(
        SourceError, match=rf"{name} has [\d,]+ bytes and unpacks to more than .* name the unpacked file"
    ):
        open_rows(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000
    assert numbers(write_rows(tmp_path / "rows.jsonl", *ROWS)) == [0, 1, 2, 3, 4]


def test_contents_that_the_disk_does_not_hold_are_refused_before_it_is_full(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20))
    with pytest.raises(
        SourceError, match=r"a\.jsonl\.gz needs more than 45 bytes in .*, where 20 were free; let TMPDIR"
    ):
        open_rows(tmp_path / "a.jsonl.gz")


def test_text_that_packs_well_is_no_bomb(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES * 100_000))
    with closing(open_rows(tmp_path / "a.jsonl.gz")) as rows:
        assert len(rows) == 500_000


def test_a_compressed_document_is_read_too(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    assert numbers(tmp_path / "a.json.gz") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", LINES, "not compressed as its name says"),
        ("a.jsonl", b"PAR1....PAR1", "is a parquet file; name it .parquet"),
    ],
)
def test_a_file_is_named_by_what_it_holds(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        open_rows(tmp_path / name)


def test_a_compressed_file_needs_no_suffix_of_its_own(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(LINES))
    assert numbers(tmp_path / "a.jsonl") == [0, 1, 2, 3, 4]


@pytest.fixture
def three(tmp_path):
    for name, row in (("b.jsonl", 1), ("a.jsonl", 0), ("c.jsonl", 2)):
        write_rows(tmp_path / name, {"a": row}, {"a": 10 + row})
    return tmp_path


def test_a_glob_is_its_files_in_sorted_order_and_a_list_those_as_given(three):
    assert numbers(three / "*.jsonl") == [0, 10, 1, 11, 2, 12]
    assert numbers([three / "c.jsonl", three / "a.jsonl"]) == [2, 12, 0, 10]
    assert numbers(three / "*.jsonl", [5, 0, 3, 4]) == [12, 0, 11, 2]


def test_a_row_of_several_files_is_told_by_its_own(three):
    with closing(open_rows(three / "*.jsonl")) as rows:
        assert rows.where(3) == f"{three / 'b.jsonl'}, line 2"


def test_the_hash_of_several_files_depends_on_their_contents_and_order_alone(three, tmp_path):
    def hash_of(*names):
        with closing(open_rows([three / name for name in names])) as rows:
            return rows.content_sha256

    one = hash_of("a.jsonl", "b.jsonl")
    (three / "b.jsonl").rename(three / "d.jsonl")
    assert hash_of("a.jsonl", "d.jsonl") == one != hash_of("d.jsonl", "a.jsonl")


def test_more_files_than_are_kept_open_are_read(tmp_path):
    for index in range(80):
        write_rows(tmp_path / f"{index:02}.jsonl", {"a": index})
    assert numbers(tmp_path / "*.jsonl") == list(range(80))
    assert numbers(tmp_path / "*.jsonl", [79, 0, 78, 1]) == [79, 0, 78, 1]


@pytest.mark.parametrize("data", ["missing/x.jsonl", "data/chats.jsonl.gz", "no_such_*.jsonl", "missing", "org//x"])
def test_what_is_not_there_is_a_missing_file_and_no_name_on_a_hub(data):
    with pytest.raises(FileNotFoundError, match=r"no such file|no file matches"):
        open_rows(data)


@pytest.mark.parametrize("data", ["", " ", []])
def test_no_data_is_an_error(data):
    with pytest.raises(SourceError, match=r"data"):
        open_rows(data)


def test_a_device_is_no_file_of_rows():
    with pytest.raises(SourceError, match="not a regular file"):
        open_rows("/dev/null")


def test_files_of_different_kinds_are_read_as_one(tmp_path):
    lines = write_rows(tmp_path / "a.jsonl", {"a": 0}, {"a": 1})
    (tmp_path / "b.json").write_text('[{"a": 2}, {"a": 3}]')
    assert numbers([lines, tmp_path / "b.json"]) == [0, 1, 2, 3]


def test_a_document_too_large_for_memory_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(LARGEST_DOCUMENT + 1)
    with pytest.raises(SourceError, match=r"one JSON document of 1,073,741,825 bytes.*\.jsonl"):
        open_rows(tmp_path / "a.json")


def rows_of(path: Path) -> list[object]:
    with closing(open_rows(path)) as rows:
        return [parse_row(text)[0] for text in rows.take(range(len(rows)))]


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


def test_a_document_that_is_not_json_says_where(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(SourceError, match=r"a\.json: not valid JSON \(Extra data at line 2, column 1\).*\.jsonl"):
        open_rows(tmp_path / "a.json")


def test_a_file_that_changed_is_not_read_by_stale_offsets(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"a": 1}, {"a": 2})
    rows = open_rows(path)
    write_rows(path, {"b": 1})
    with pytest.raises(SourceError, match="was changed"):
        rows.take([1])


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({"loss_mask": [0, 1, 1]}, [0, 1, 1]),
        ({"loss_mask": [False, True, False]}, [0, 1, 0]),
        ({"labels": [-100, 6, -100]}, [0, 1, 0]),
        ({"loss_mask": [1, 0, 0], "labels": [-100, 6, 7]}, [1, 0, 0]),
        ({"attention_mask": [1, 1, 1]}, [1, 1, 1]),
        ({"loss_mask": None, "labels": None}, [1, 1, 1]),
    ],
)
def test_tokens_are_taken_as_they_are(fields, mask):
    ids, read = read_tokens({"input_ids": [5, 6, 7], **fields}, 8)
    assert (ids.dtype.name, ids.tolist(), read.dtype.name, read.tolist()) == ("int32", [5, 6, 7], "uint8", mask)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": [5, 8]}, r"input_ids\[1\] is 8, expected 0 to 7"),
        ({"input_ids": [-1]}, r"input_ids\[0\] is -1"),
        ({"input_ids": "5 6"}, "input_ids must be a list of integers, got str"),
        ({"input_ids": [5, 6.0]}, r"input_ids\[1\] must be an integer, got 6.0"),
        ({"input_ids": [2**70]}, "more than 64 bits"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 values and input_ids 3"),
        ({"loss_mask": [0, 2, 1]}, "loss_mask holds 2, expected 0 and 1"),
        ({"labels": [6, 7, -100]}, r"labels\[0\] is 6 and input_ids\[0\] is 5.*not shifted"),
        ({"attention_mask": [1, 1, 0]}, "the row is padded"),
    ],
)
def test_anything_else_is_an_error(fields, message):
    with pytest.raises(SourceError, match=message):
        read_tokens({"input_ids": [5, 6, 7], **fields}, 8)


def test_rows_of_tokens_need_no_tokenizer_and_may_stand_among_conversations(tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    path = write_rows(tmp_path / "a.jsonl", row, {"messages": CHAT})
    here = ChatSource(path, word_tokenizer(), seq_length=3)
    first = next(here.read())
    assert (first.input_ids.tolist(), first.cursor) == ([5, 6, 7], 1)
    alone = ChatSource(path, None, seq_length=3, split="train[:1]")
    assert alone.identity()["type"] == "tokens"
    assert [sample.loss_mask.tolist() for sample in alone.read()] == [[0, 1, 1]]
    with pytest.raises(SourceError, match=r"line 2: the row has no input_ids, and this source has no tokenizer"):
        list(ChatSource(path, None, seq_length=3).read())
