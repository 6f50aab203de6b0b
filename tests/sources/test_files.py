import gzip
import json
import shutil
import tracemalloc
from contextlib import closing
from types import SimpleNamespace

import pytest

from dspark_store.sources import jsonl
from dspark_store.sources.files import LARGEST_DOCUMENT, open_rows
from dspark_store.sources.rows import parse_row
from dspark_store.sources.source import SourceError
from tests.sources.words import write_rows

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
