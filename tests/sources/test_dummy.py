import numpy as np
import pytest

from dspark_store.sources.dummy import DummySource, build_dummy
from dspark_store.sources.registry import SourceContext
from dspark_store.sources.source import SourceError

CONTEXT = SourceContext(seq_length=8, vocab_size=100)


def dummy(**options):
    return build_dummy(CONTEXT, **{"samples": 20, **options})


def rows(source, cursor=0):
    return [sample.input_ids.tolist() for sample in source.read(cursor)]


def test_samples_are_the_same_everywhere():
    assert [sample.input_ids.tolist() for sample in dummy(samples=3, max_length=8).read()] == [
        [40, 29],
        [11],
        [38, 35, 82, 90, 39, 52],
    ]


def test_neighbouring_seeds_share_no_sample():
    assert not {tuple(row) for row in rows(dummy(seed=42))} & {tuple(row) for row in rows(dummy(seed=43))}


def test_samples_are_whole_of_the_vocabulary_and_supervised():
    samples = list(dummy(samples=200).read())
    ids = np.concatenate([sample.input_ids for sample in samples])
    assert ids.dtype == np.int32
    assert set(ids.tolist()) == set(range(100))
    assert all(len(sample.input_ids) == 8 and sample.loss_mask.tolist() == [1] * 8 for sample in samples)


def test_lengths_are_known_and_fill_their_range():
    source = dummy(min_length=3, max_length=6)
    assert source.lengths().tolist() == [len(row) for row in rows(source)]
    assert set(source.lengths().tolist()) == {3, 4, 5, 6}


def test_reading_goes_on_at_any_cursor_and_at_random():
    source = dummy(max_length=5)
    whole = rows(source)
    assert [sample.cursor for sample in source.read()] == list(range(1, 21))
    assert rows(source, 7) == whole[7:]
    assert rows(source, 20) == []
    assert source.sample(13).input_ids.tolist() == whole[13]


def test_a_split_takes_part_of_the_same_samples():
    assert rows(dummy(split="train[5:9]")) == rows(dummy())[5:9]


def test_the_job_says_what_an_option_does_not():
    source = build_dummy(SourceContext(seq_length=4, max_samples=7, seed=5))
    assert len(source) == 7
    assert source.identity()["seed"] == 5
    assert source.identity()["vocab"] == 32000
    assert len(build_dummy(SourceContext(seq_length=4, num_samples=11))) == 11


def test_a_record_or_cursor_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match="record 20"):
        dummy().sample(20)
    with pytest.raises(ValueError, match="cursor is 21"):
        dummy().read(21)


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0},
        {"samples": "many"},
        {"samples": True},
        {"max_length": 9},
        {"min_length": 0},
        {"min_length": 9},
        {"vocab": 0},
        {"vocab": 2**31 + 1},
        {"seed": -1},
    ],
)
def test_a_number_out_of_its_range_is_refused(options):
    (name,) = options
    with pytest.raises(SourceError, match=f"{name} of a dummy source is {next(iter(options.values()))!r}"):
        dummy(**options)


def test_the_largest_ids_fit():
    source = DummySource(samples=50, min_length=9, max_length=9, vocab=2**31, seed=2**64 - 1)
    assert all((sample.input_ids >= 0).all() for sample in source.read())
