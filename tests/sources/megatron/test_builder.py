import hashlib
from pathlib import Path

import numpy as np
import pytest

from dspark_store.sources.megatron import PairBuilder, dtype_for_vocabulary, open_pair
from tests.sources.megatron.golden import GOLDEN, GoldenPair
from tests.sources.megatron.pairs import write_pair


def small(prefix: Path) -> Path:
    return write_pair(prefix, [[10, 11, 20, 21, 22], [30], []], "uint16", [[2, 3], [1], []])


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_the_files_are_those_that_megatron_writes(golden: GoldenPair, tmp_path):
    golden.build(tmp_path / "corpus")
    assert hashlib.sha256((tmp_path / "corpus.idx").read_bytes()).hexdigest() == golden.idx_sha256
    assert hashlib.sha256((tmp_path / "corpus.bin").read_bytes()).hexdigest() == golden.bin_sha256


def test_the_worked_example_is_written_byte_by_byte(tmp_path):
    small(tmp_path / "a")
    index = (
        "4d4d494449445800 00 0100000000000000 08 0300000000000000 0400000000000000 02000000 03000000 01000000"
        "0000000000000000 0400000000000000 0a00000000000000"
        "0000000000000000 0200000000000000 0300000000000000 0300000000000000"
    )
    assert (tmp_path / "a.idx").read_bytes() == bytes.fromhex(index)
    assert len(bytes.fromhex(index)) == 102
    assert (tmp_path / "a.bin").read_bytes() == bytes.fromhex("0a00 0b00 1400 1500 1600 1e00")


def test_an_empty_pair_has_42_bytes_and_opens(tmp_path):
    write_pair(tmp_path / "a", [])
    assert (tmp_path / "a.idx").stat().st_size == 42
    pair = open_pair(tmp_path / "a")
    assert (len(pair.lengths), pair.boundaries.tolist()) == (0, [0])


def test_a_pair_merged_with_itself_keeps_its_documents_apart(tmp_path):
    small(tmp_path / "a")
    with PairBuilder(tmp_path / "b", dtype=np.uint16) as builder:
        builder.add_pair(tmp_path / "a")
        builder.add_pair(tmp_path / "a")
    index = open_pair(tmp_path / "b")
    assert index.lengths.tolist() == [2, 3, 1, 2, 3, 1]
    assert index.boundaries.tolist() == [0, 2, 3, 3, 5, 6, 6]
    assert index.pointers.tolist() == [0, 4, 10, 12, 16, 22]
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes() * 2


def test_what_is_given_no_modes_is_text(tmp_path):
    with PairBuilder(tmp_path / "a", multimodal=True) as builder:
        builder.add_document([1, 2, 3, 4, 5], [3, 2])
        builder.add_document([6, 7], [2])
        builder.add_document([8, 9], [1, 1], [0, 1])
    modes = open_pair(tmp_path / "a", skip_images=True).modes
    assert modes is not None
    assert modes.tolist() == [0, 0, 0, 0, 1]


def test_modes_are_merged_and_a_text_pair_counts_as_text(tmp_path):
    golden = GOLDEN["multimodal"]
    golden.build(tmp_path / "a")
    write_pair(tmp_path / "text", [[7, 8]])
    with PairBuilder(tmp_path / "b", multimodal=True) as builder:
        builder.add_pair(tmp_path / "text")
        builder.add_pair(tmp_path / "a")
    modes = open_pair(tmp_path / "b", skip_images=True).modes
    assert modes is not None
    assert modes.tolist() == [0, *(golden.modes or ())]
    with PairBuilder(tmp_path / "c") as builder, pytest.raises(ValueError, match=r"a\.idx has modes.*multimodal=True"):
        builder.add_pair(tmp_path / "a")


def test_a_pair_of_another_dtype_is_not_merged(tmp_path):
    small(tmp_path / "a")
    with PairBuilder(tmp_path / "b") as builder, pytest.raises(ValueError, match=r"holds uint16.*this pair int32"):
        builder.add_pair(tmp_path / "a")


@pytest.mark.parametrize(
    ("dtype", "tokens", "bad"), [("uint16", [65535, 65536], 65536), ("uint16", [-1], -1), ("int32", [2**31], 2**31)]
)
def test_a_token_that_the_dtype_cannot_hold_is_refused_and_not_wrapped(dtype, tokens, bad, tmp_path):
    with PairBuilder(tmp_path / "a", dtype=dtype) as builder:
        for add in (builder.add_item, builder.add_document):
            with pytest.raises(ValueError, match=rf"token \d is {bad}, and {dtype} holds .* wider dtype"):
                add(np.array(tokens))
    assert len(open_pair(tmp_path / "a").lengths) == 0


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], [True], ["a"]])
def test_what_is_no_row_of_integers_is_refused(tokens, tmp_path):
    with PairBuilder(tmp_path / "a") as builder, pytest.raises(ValueError, match="expected one row of integers"):
        builder.add_item(tokens)


def test_a_sequence_in_no_document_is_not_glued_to_the_next_one(tmp_path):
    small(tmp_path / "a")
    builder = PairBuilder(tmp_path / "b", dtype="uint16")
    builder.add_item([1])
    for call in (lambda: builder.add_pair(tmp_path / "a"), lambda: builder.add_document([2]), builder.finish):
        with pytest.raises(ValueError, match="last 1 sequences are in no document; call end_document before"):
            call()
    builder.end_document()
    builder.finish()
    assert open_pair(tmp_path / "b").boundaries.tolist() == [0, 1]


@pytest.mark.parametrize(("lengths", "modes"), [([1], None), ([4, -1], None), ([3], [0, 0]), ([3], [1]), ([3], [200])])
def test_a_document_whose_lengths_or_modes_do_not_fit_is_refused_whole(lengths, modes, tmp_path):
    multimodal = modes == [200]
    with PairBuilder(tmp_path / "a", multimodal=multimodal) as builder:
        with pytest.raises(ValueError, match=r"add up|one each|multimodal=True|expected -128"):
            builder.add_document([1, 2, 3], lengths, modes)
        builder.add_document([9])
    assert open_pair(tmp_path / "a").stream(0, 1).tolist() == [9]


def test_no_file_has_its_name_before_the_pair_is_whole(tmp_path):
    with PairBuilder(tmp_path / "sub" / "a") as builder:
        builder.add_document([1])
        assert not list(tmp_path.glob("sub/a.*"))
    assert {path.name for path in (tmp_path / "sub").iterdir()} == {"a.bin", "a.idx"}


def test_a_block_that_raises_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="one row"), PairBuilder(tmp_path / "a") as builder:
        builder.add_document([[1]])
    assert not list(tmp_path.iterdir())


def test_a_pair_that_exists_is_never_replaced(tmp_path):
    small(tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"a\.bin exists"):
        PairBuilder(tmp_path / "a")
    builder = PairBuilder(tmp_path / "b")
    (tmp_path / "b.idx").write_text("mine")
    with pytest.raises(FileExistsError, match=r"b\.idx appeared"):
        builder.finish()
    assert (tmp_path / "b.idx").read_text() == "mine"
    assert not (tmp_path / "b.bin").exists()


def test_a_finished_pair_takes_no_more(tmp_path):
    builder = PairBuilder(tmp_path / "a")
    builder.finish()
    with pytest.raises(ValueError, match="finished or discarded"):
        builder.add_item([1])


@pytest.mark.parametrize(("size", "dtype"), [(65499, "uint16"), (65500, "int32"), (None, "int32")])
def test_the_dtype_is_chosen_from_the_vocabulary_as_megatron_does(size, dtype):
    assert dtype_for_vocabulary(size) == np.dtype(dtype)


@pytest.mark.parametrize(("dtype", "message"), [("uint32", "has no code"), ("float32", "holds no token ids")])
def test_a_dtype_without_a_code_or_of_floats_is_refused(dtype, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PairBuilder(tmp_path / "a", dtype=dtype)
    assert not list(tmp_path.iterdir())
