import gc
import hashlib
import os
from itertools import accumulate, combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.megatron import PairBuilder, open_pair
from dspark_store.sources.source import SourceError
from tests.sources.megatron.golden import GOLDEN, GoldenPair
from tests.sources.megatron.pairs import write_pair


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_golden_pairs_read_exactly(golden: GoldenPair, tmp_path):
    pair = open_pair(golden.build(tmp_path / "corpus"), skip_images=True)
    assert pair.index.dtype == np.dtype(golden.dtype)
    assert pair.index.lengths.tolist() == list(golden.lengths)
    assert pair.index.boundaries.tolist() == list(golden.boundaries)
    assert (None if pair.index.modes is None else tuple(pair.index.modes)) == golden.modes
    assert [pair.sequence(number).tolist() for number in range(len(golden.lengths))] == golden.sequences()
    assert [pair.document(number).tolist() for number in range(len(golden.documents()))] == golden.documents()


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
    assert [pair.document(number).tolist() for number in range(len(documents))] == text
    stream = [token for document in text for token in document]
    assert pair.document_starts().tolist() == [0, *accumulate(map(len, text))]
    for start, stop in combinations(range(len(stream) + 1), 2):
        assert pair.stream(start, stop).tolist() == stream[start:stop]


def test_images_are_refused_unless_they_are_skipped(tmp_path):
    prefix = GOLDEN["multimodal"].build(tmp_path / "corpus")
    with pytest.raises(SourceError, match=r"document 0 \(sequence 1\) has the mode 1.*2 of 6 sequences.*skip_images"):
        open_pair(prefix)
    assert open_pair(prefix, skip_images=True).num_tokens == 34 - 4 - 3


def test_numbers_past_the_end_are_refused_and_negative_ones_count_from_it(tmp_path):
    pair = open_pair(write_pair(tmp_path / "a", [[1, 2], [3]]))
    assert pair.sequence(-1).tolist() == pair.document(-1).tolist() == [3]
    for read in (pair.sequence, pair.document):
        for number in (2, -3):
            with pytest.raises(IndexError, match="expected -2 to 1"):
                read(number)


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
    tokens, lengths = pair.sequence(0), pair.index.lengths
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
