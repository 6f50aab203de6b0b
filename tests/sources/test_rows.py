import pytest

from dspark_store.sources import ChatSource, SourceError
from dspark_store.sources.rows import read_tokens
from tests.sources.words import CHAT, word_tokenizer, write_rows


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
