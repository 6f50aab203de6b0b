"""Content hashes of what turns text into tokens."""

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the SHA-256, in hex, of everything that decides which ids a text gets.

    That is the fast backend (or, without one, the class and the vocabulary), the special tokens, which templates can
    write, and the added ones. Where the tokenizer was loaded from does not count, nor does how it pads and truncates,
    the pad token included.
    """
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend.update(truncation=None, padding=None)
    else:
        backend = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    added = {str(token_id): repr(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    return _sha256(
        _canonical_json(
            {
                "backend": backend,
                "special_tokens": special,
                "added_tokens": added,
                "split_special_tokens": bool(tokenizer.split_special_tokens),
            }
        )
    )


def chat_template_sha256(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the SHA-256, in hex, of the chat template's text; of "" if there is none.

    Of several templates with names, it is that of their canonical JSON.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return _sha256(_canonical_json(template))
    return _sha256(template or "")


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
