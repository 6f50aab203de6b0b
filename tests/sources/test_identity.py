import hashlib

from transformers import AutoTokenizer, PreTrainedTokenizer

from dspark_store.sources.identity import chat_template_sha256, tokenizer_sha256
from tests.sources.words import PLAIN, word_tokenizer


class Letters(PreTrainedTokenizer):
    def __init__(self, letters: str, **options: object) -> None:
        self._letters = letters
        super().__init__(unk_token="a", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._letters)

    def get_vocab(self) -> dict[str, int]:
        return {letter: index for index, letter in enumerate(self._letters)}

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab()[token]


def test_two_copies_at_different_paths_agree(tmp_path):
    tokenizer = word_tokenizer(PLAIN)
    hashes = {tokenizer_sha256(tokenizer)}
    for name in ("a", "b"):
        tokenizer.save_pretrained(tmp_path / name)
        hashes.add(tokenizer_sha256(AutoTokenizer.from_pretrained(tmp_path / name)))
    assert len(hashes) == 1


def test_padding_and_truncation_do_not_count():
    tokenizer = word_tokenizer(PLAIN)
    before = tokenizer_sha256(tokenizer)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    tokenizer("hi", padding="max_length", truncation=True, max_length=8)
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer_sha256(tokenizer) == before


def test_an_added_token_or_another_special_token_counts():
    plain, added, special = word_tokenizer(), word_tokenizer(), word_tokenizer(eos_token="ok")
    added.add_tokens(["new"])
    assert len({tokenizer_sha256(tokenizer) for tokenizer in (plain, added, special)}) == 3


def test_a_tokenizer_without_fast_backend_is_hashed_by_its_vocabulary():
    assert tokenizer_sha256(Letters("abc")) == tokenizer_sha256(Letters("abc", name_or_path="elsewhere"))
    assert tokenizer_sha256(Letters("abc")) != tokenizer_sha256(Letters("acb"))


def test_the_template_hash_is_that_of_its_text():
    assert chat_template_sha256(word_tokenizer(PLAIN)) == hashlib.sha256(PLAIN.encode()).hexdigest()
    assert chat_template_sha256(word_tokenizer(None)) == hashlib.sha256(b"").hexdigest()


def test_named_templates_are_hashed_in_any_order():
    one, other = word_tokenizer(), word_tokenizer()
    one.chat_template = {"default": "a", "tool_use": "b"}
    other.chat_template = {"tool_use": "b", "default": "a"}
    assert chat_template_sha256(one) == chat_template_sha256(other)
