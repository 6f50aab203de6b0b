"""What turns text into tokens: the number of the rule, and content hashes of tokenizer and template."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dspark_store.format.jsonvalue import JsonValue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_RULE = 2
"""By which rule conversations become ids and masks: any change of either is a new number. The identity of a source of
type `chat` has it as `rule`; one without it was made by rule 1."""

_FIRST_RULE = 1


def chat_rules(identity: JsonValue) -> list[int]:
    """Return the rules that a source's conversations were made by: one, those of a blend's parts, or none."""
    if not isinstance(identity, Mapping):
        return []
    if identity.get("type") == "blend":
        parts = identity.get("parts")
        return sorted({rule for part in (parts if isinstance(parts, list) else []) for rule in chat_rules(part)})
    rule = identity.get("rule", _FIRST_RULE)
    return [rule] if identity.get("type") == "chat" and isinstance(rule, int) else []


def without_rules(identity: JsonValue) -> JsonValue:
    """Return a source's identity without the rules of its conversations, and what only later rules read."""
    if not isinstance(identity, Mapping):
        return identity
    if identity.get("type") == "blend" and isinstance(parts := identity.get("parts"), list):
        return {**identity, "parts": [without_rules(part) for part in parts]}
    later = ("rule", "beside_sha256") if identity.get("type") == "chat" else ()
    return {name: value for name, value in identity.items() if name not in later}


def comparable(stored: JsonValue, own: JsonValue) -> tuple[JsonValue, JsonValue]:
    """Return two sources' identities as they are, or as far as both rules know them where the rules differ."""
    if chat_rules(stored) == chat_rules(own):
        return stored, own
    return without_rules(stored), without_rules(own)


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
