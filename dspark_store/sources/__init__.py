"""Where tokens come from: conversations in files, with the loss mask of what the assistant said."""

from dspark_store.sources.chat import ChatSource
from dspark_store.sources.identity import chat_template_sha256, tokenizer_sha256
from dspark_store.sources.source import Sample, Source, SourceError
from dspark_store.sources.template import apply_chat_template_option

__all__ = [
    "ChatSource",
    "Sample",
    "Source",
    "SourceError",
    "apply_chat_template_option",
    "chat_template_sha256",
    "tokenizer_sha256",
]
