"""The tokenizer of a store's target, without the network."""

import pytest

from dspark_store.inspection.tokenizer import find_tokenizer
from dspark_store.sources.identity import tokenizer_sha256
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "it"
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_target_is_taken_where_it_is(saved):
    found = find_tokenizer({"target_model": saved, "target_revision": ""})
    assert found.tokenizer is not None
    assert found.note == ""


def test_one_that_is_given_comes_first_and_another_than_the_stores_is_told(saved):
    right = tokenizer_sha256(tiny_tokenizer())
    for recorded, told in ((right, False), ("0" * 64, True)):
        found = find_tokenizer({"target_model": "/gone", "tokenizer_sha256": recorded}, saved)
        assert found.tokenizer is not None
        assert ("not the tokenizer that the store was made with" in found.note) == told


@pytest.mark.parametrize("model", ["/gone/away", "nobody/nothing-here", "a/b/c", None])
def test_a_target_that_is_not_here_leaves_ids_and_says_what_to_do(model):
    found = find_tokenizer({"target_model": model, "target_revision": "main"})
    assert found.tokenizer is None
    assert "--tokenizer" in found.note


def test_one_that_is_given_and_cannot_be_loaded_is_a_mistake():
    with pytest.raises(ValueError, match="there is no such directory"):
        find_tokenizer({}, "/gone/away")
