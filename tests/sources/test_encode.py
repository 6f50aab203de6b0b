from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources import SourceError
from dspark_store.sources.encode import cut
from dspark_store.sources.options import RowOptions
from tests.sources.words import CHAT, open_chats, word_tokenizer, write_rows

IDS, MASK = np.arange(7, dtype=np.int32), np.array([0, 0, 0, 1, 1, 0, 1], np.uint8)


def pieces(seq_length, **options):
    return [ids.tolist() for ids, _ in cut(IDS, MASK, seq_length, RowOptions(**options)).pieces]


def test_what_is_short_stays_whole():
    for over_long in ("truncate", "drop", "split"):
        assert pieces(seq_length=7, over_long=over_long) == [IDS.tolist()]


def test_what_is_long_is_cut_left_out_or_divided():
    assert pieces(seq_length=3) == [[0, 1, 2]]
    assert pieces(seq_length=3, truncation_side="left") == [[4, 5, 6]]
    assert pieces(seq_length=3, over_long="drop") == []
    assert pieces(seq_length=3, over_long="split") == [[0, 1, 2], [3, 4, 5], [6]]


def test_pieces_with_too_little_supervised_are_left_out_and_counted():
    made = cut(IDS, MASK, 3, RowOptions(over_long="split", min_supervised=1))
    assert [ids.tolist() for ids, _ in made.pieces] == [[3, 4, 5], [6]]
    assert (made.too_few_supervised, made.split) == (1, True)
    assert cut(IDS, MASK, 3, RowOptions(min_supervised=1)).pieces == []


@given(st.integers(0, 30), st.integers(1, 12))
def test_the_pieces_of_a_split_are_the_whole(length, seq_length):
    ids, mask = np.arange(length, dtype=np.int32), np.zeros(length, np.uint8)
    made = cut(ids, mask, seq_length, RowOptions(over_long="split")).pieces
    assert np.concatenate([piece for piece, _ in made]).tolist() == ids.tolist()
    assert all(len(piece) == seq_length for piece, _ in made[:-1])


@pytest.mark.parametrize(
    ("seq_length", "options"),
    [
        (0, {}),
        (8, {"num_workers": -1}),
        (8, {"on_bad_row": "stop"}),
        (8, {"max_refused": float("nan")}),
        (8, {"over_long": "shrink"}),
        (8, {"truncation_side": "middle"}),
        (8, {"min_supervised": 99}),
    ],
)
def test_impossible_options_are_refused(seq_length, options):
    with pytest.raises(SourceError, match=r"is .*; expected"):
        open_chats(Path("rows.jsonl"), None, seq_length=seq_length, **options)


def test_reading_goes_on_inside_a_row_that_was_divided(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"messages": CHAT[:1]}, {"messages": CHAT}, {"messages": CHAT[2:]})
    source = open_chats(path, word_tokenizer(), seq_length=4, over_long="split")
    every = list(source.read())
    assert [len(sample.input_ids) for sample in every] == [4, 1, 4, 4, 4, 4, 2, 4, 4]
    cursors = [sample.cursor for sample in every]
    assert cursors == sorted(set(cursors))
    assert [source.record_of(cursor) for cursor in cursors] == [0, 1, 1, 1, 1, 1, 2, 2, 3]
    for place, cursor in enumerate(cursors):
        rest = [sample.input_ids.tolist() for sample in source.read(cursor)]
        assert rest == [sample.input_ids.tolist() for sample in every[place + 1 :]]
    assert source.sample(1).input_ids.tolist() == every[2].input_ids.tolist()
