"""Tokenizers of whole words, so that expected masks can be written down by hand."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from dspark_store.sources.chat import ChatSource
from dspark_store.sources.messages import Message
from dspark_store.sources.options import DEFAULT_OPTIONS, ChatOptions, option_values

SPECIAL_WORDS = ["<pad>", "<unk>", "<s>", "</s>"]
ROLES = ["system", "user", "assistant", "tool", "assistant_thinking"]
OTHER_WORDS = ["hi", "there", "yo", "ok", "bye", "<think>", "</think>", "r1", "r2", "r3", "w1", "w2", "w3"]
WORDS = SPECIAL_WORDS + ROLES + OTHER_WORDS

PLAIN = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
TAGGED = (
    "{% for m in messages %}<s> {{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s> "
    "{% endgeneration %}{% else %}{{ m.content }} </s> {% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<s> {{ m.role }} {% if m.reasoning_content %}<think> {{ m.reasoning_content }} </think> "
    "{% endif %}{{ m.content }} </s> {% endfor %}"
)
THINKING_IN_LAST_TURN_ONLY = (
    "{% for m in messages %}<s> {{ m.role }} {% if m.reasoning_content and loop.last %}"
    "<think> {{ m.reasoning_content }} </think> {% endif %}{{ m.content }} </s> {% endfor %}"
)

HEADER = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.first %}<s> {% endif %}user {{ m.content }} </s> "
    "{% elif m.reasoning_content %}assistant_thinking {{ m.reasoning_content }} {{ m.content }} </s> "
    "{% else %}assistant {{ m.content }} </s> {% endif %}{% endfor %}"
)

HEADER_CHAT: list[Message] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "reasoning_content": "r1 r2"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ok", "reasoning_content": "r3"},
]

CHAT: list[Message] = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "yo ok"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok"},
]


def word_tokenizer(template: str | None = PLAIN, **options: object) -> PreTrainedTokenizerFast:
    """Give a tokenizer that splits at white space, with `<s>` and `</s>` as special tokens and 0 for padding."""
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **options}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


def open_chats(path: Path, tokenizer: PreTrainedTokenizerFast | None, **options: Any) -> ChatSource:
    """Open a source, of which some options are those of conversations."""
    chat = {name: options.pop(name) for name in option_values(DEFAULT_OPTIONS) if name in options}
    return ChatSource(path, tokenizer, ChatOptions(**chat), **options)


def write_rows(path: Path, *rows: object) -> Path:
    """Write one JSON text a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
