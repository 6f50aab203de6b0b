import gc
import hashlib
import os
import struct
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.megatron import IndexedPair, PairBuilder, open_pair
from dspark_store.sources.megatron.pair import DTYPES, HEADER, MAGIC, dtype_code
from dspark_store.sources.source import SourceError
from tests.sources.megatron.golden import GOLDEN
from tests.sources.megatron.pairs import write_pair


def documents_of(pair: IndexedPair) -> list[list[int]]:
    return [pair.stream(start, stop).tolist() for start, stop in pairwise(pair.document_starts().tolist())]


@given(
    st.lists(st.lists(st.tuples(st.lists(st.integers(0, 255), max_size=4), st.integers(0, 1)), max_size=3), max_size=4),
    st.sampled_from(["uint8", "int16", "int32", "int64", "uint16"]),
)
def test_what_is_built_reads_back(documents, dtype):
    with TemporaryDirectory() as directory:
        with PairBuilder(Path(directory, "a"), dtype=dtype, multimodal=True) as builder:
            for document in documents:
                for tokens, mode in document:
                    builder.add_item(tokens, mode)
                builder.end_document()
        pair = open_pair(Path(directory, "a"), skip_images=True)
    text = [[token for tokens, mode in document if not mode for token in tokens] for document in documents]
    assert documents_of(pair) == text
    stream = [token for document in text for token in document]
    assert pair.document_starts().tolist() == [0, *accumulate(map(len, text))]
    for start, stop in combinations(range(len(stream) + 1), 2):
        assert pair.stream(start, stop).tolist() == stream[start:stop]


def test_images_are_refused_unless_they_are_skipped(tmp_path):
    prefix = GOLDEN["multimodal"].build(tmp_path / "corpus")
    with pytest.raises(SourceError, match=r"document 0 \(sequence 1\) has the mode 1.*2 of 6 sequences.*skip_images"):
        open_pair(prefix)
    assert open_pair(prefix, skip_images=True).num_tokens == 34 - 4 - 3


def test_a_span_never_runs_past_the_stream(tmp_path):
    pair = open_pair(write_pair(tmp_path / "a", [[1, 2], [3]]))
    assert pair.stream(1, 3).tolist() == [2, 3]
    assert pair.stream(3, 3).tolist() == []
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(ValueError, match="expected one in 0:3"):
            pair.stream(start, stop)


def test_arrays_outlive_the_pair_and_its_files(tmp_path):
    prefix = write_pair(tmp_path / "a", [[5, 6, 7], [8]])
    pair = open_pair(prefix)
    tokens, lengths = pair.sequence(0), pair.lengths
    del pair
    gc.collect()
    prefix.with_suffix(".bin").unlink()
    prefix.with_suffix(".idx").unlink()
    assert tokens.tolist() == [5, 6, 7]
    assert lengths.tolist() == [3, 1]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_the_sha256_is_that_of_the_files(tmp_path):
    prefix = write_pair(tmp_path / "a", [[5, 6, 7]])
    digests = open_pair(prefix).sha256()
    assert digests == {
        f"{name}_sha256": hashlib.sha256(prefix.with_suffix(f".{name}").read_bytes()).hexdigest()
        for name in ("idx", "bin")
    }


def test_a_change_of_a_file_under_an_open_pair_is_noticed(tmp_path):
    prefix = write_pair(tmp_path / "a", [[5, 6, 7]])
    pair = open_pair(prefix)
    pair.require_unchanged()
    os.truncate(prefix.with_suffix(".bin"), 4)
    for call in (pair.require_unchanged, pair.sha256):
        with pytest.raises(SourceError, match="was changed while it was in use"):
            call()


def write_raw(
    prefix: Path,
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    code: int = 8,
    lengths=(2, 3, 1),
    pointers=(0, 4, 10),
    boundaries=(0, 2, 3),
    counts: tuple[int, int] | None = None,
    tail: bytes = b"",
    payload: bytes = bytes(12),
) -> Path:
    """Write a pair by hand, by default a whole one."""
    counts = counts or (len(lengths), len(boundaries))
    index = HEADER.pack(magic, version, code, *counts) + struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(boundaries)}q", *boundaries)
    prefix.with_suffix(".idx").write_bytes(index + tail)
    prefix.with_suffix(".bin").write_bytes(payload)
    return prefix


def test_a_whole_pair_is_read(tmp_path):
    payload = np.array([10, 11, 20, 21, 22, 30], "<u2").tobytes()
    pair = open_pair(write_raw(tmp_path / "a", payload=payload))
    assert pair.dtype == np.dtype("<u2")
    assert (len(pair.lengths), len(documents_of(pair)), pair.num_tokens) == (3, 2, 6)
    assert pair.sequence(1).tolist() == [20, 21, 22]
    assert pair.contiguous


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"magic": b"XMIDIDX\x00\x00"}, r"begins with b'XMIDIDX.*begins with b'MMIDIDX"),
        ({"version": 2}, "is of version 2; only version 1"),
        ({"code": 0}, "dtype code 0; expected one of 1 uint8"),
        ({"code": 9}, "dtype code 9; expected one of"),
        ({"counts": (3, 0)}, "0 document boundaries"),
        ({"counts": (3, 4)}, r"has 94 bytes, and 3 sequences and 4 document boundaries need 102: the last 8 bytes"),
        ({"counts": (2**63, 3)}, "9223372036854775808 sequences.*counts are damaged"),
        ({"tail": b"12"}, r"has 96 bytes.*need 94, or 97 with modes"),
        ({"lengths": (2, -3, 1)}, "sequence 1 has the length -3"),
        ({"boundaries": (1, 2, 3)}, "first document starts at sequence 1; expected 0"),
        ({"boundaries": (0, 2, 2)}, "last document boundary is 2; expected 3.*never ended"),
        ({"boundaries": (0, 2, 1, 3)}, "document 1 starts at sequence 2 and the next one at 1"),
        ({"pointers": (0, -4, 10)}, "sequence 1 starts at byte -4"),
        ({"pointers": (0, 4, 2**63 - 1)}, "sequence 2 starts at byte 9223372036854775807"),
        ({"payload": bytes(9)}, r"a\.bin has 9 bytes.*needs 12: the last 3 bytes are missing, from document 0 \(seq"),
        ({"payload": bytes(13)}, r"a\.bin has 13 bytes.*1 bytes are in no sequence"),
        ({"pointers": (0, 4, 100)}, r"needs 102: the last 90 bytes are missing, from document 1 \(sequence 2\)"),
    ],
)
def test_damage_is_named_in_one_line(damage, message, tmp_path):
    prefix = write_raw(tmp_path / "a", **damage)
    with pytest.raises(SourceError, match=message) as caught:
        open_pair(prefix)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "a") in str(caught.value)


def test_every_truncation_of_the_index_is_refused(tmp_path):
    prefix = write_raw(tmp_path / "a")
    whole = prefix.with_suffix(".idx").read_bytes()
    for size in range(len(whole)):
        prefix.with_suffix(".idx").write_bytes(whole[:size])
        with pytest.raises(SourceError, match="bytes"):
            open_pair(prefix)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_of_the_table_is_read(code, tmp_path):
    dtype = DTYPES[code]
    payload = np.arange(6).astype(dtype).tobytes()
    pointers = (0, 2 * dtype.itemsize, 5 * dtype.itemsize)
    pair = open_pair(write_raw(tmp_path / "a", code=code, pointers=pointers, payload=payload))
    assert pair.stream(0, 5).dtype == dtype
    assert documents_of(pair)[0] == [0, 1, 2, 3, 4]
    assert dtype_code(dtype.newbyteorder(">")) == code


def test_pointers_out_of_order_are_followed_with_a_warning(tmp_path, caplog):
    payload = np.array([9, 1, 2, 3, 4, 5, 6], "<u2").tobytes()
    prefix = write_raw(tmp_path / "a", pointers=(10, 2, 8), payload=payload)
    pair = open_pair(prefix)
    assert [pair.sequence(number).tolist() for number in range(3)] == [[5, 6], [1, 2, 3], [4]]
    assert documents_of(pair)[0] == [5, 6, 1, 2, 3]
    assert pair.stream(1, 6).tolist() == [6, 1, 2, 3, 4]
    assert "their pointers are followed" in caplog.text


@pytest.mark.parametrize(("code", "itemsize"), [(1, 1), (4, 4)])
def test_two_lengths_of_2_to_the_30_do_not_wrap(tmp_path, code, itemsize):
    half = 2**30
    lengths, pointers = (half, half, 1), (0, half * itemsize, 2 * half * itemsize)
    prefix = write_raw(tmp_path / "a", code=code, lengths=lengths, pointers=pointers, boundaries=(0, 3), payload=b"")
    with pytest.raises(SourceError, match=f"needs {(2**31 + 1) * itemsize}"):
        open_pair(prefix)
    with prefix.with_suffix(".bin").open("r+b") as file:  # all but its last token is a hole
        file.seek(2 * half * itemsize)
        file.write(b"7".ljust(itemsize, b"\0"))
    pair = open_pair(prefix)
    assert pair.contiguous
    assert pair.num_tokens == 2**31 + 1
    assert pair.stream(2 * half - 1, 2 * half + 1).tolist() == [0, ord("7")]


def test_a_path_is_the_prefix_or_either_file(tmp_path):
    write_pair(tmp_path / "a", [[1]])
    write_pair(tmp_path / "b.bin", [[2]])
    for name, token in (("a", 1), ("a.bin", 1), ("a.idx", 1), ("b.bin", 2), ("b.bin.idx", 2)):
        assert documents_of(open_pair(str(tmp_path / name))) == [[token]]


@pytest.mark.parametrize("missing", [".idx", ".bin"])
def test_a_missing_file_is_named(missing, tmp_path):
    write_pair(tmp_path / "a", [[1]])
    (tmp_path / f"a{missing}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"a\{missing}: no such file; a Megatron pair is PREFIX.idx"):
        open_pair(tmp_path / "a")
