"""Where tokens come from: conversations, tokens and corpora, alone or blended, each with its loss mask.

In: a specification, as users write it, and the job's settings. Out: a `Source`, whose samples are ids, mask and cursor.
Read `source` first: what every source gives. `registry` builds one; `chat` reads rows (`files`, `rows`), `encode` makes
samples of them: `messages` reads a conversation, `rendering` its text and tokens, `masks` and `turns` its loss mask.
`blend` mixes; `megatron` reads corpora.
"""

from dspark_store.sources.blend import Blend, BlendPart, PartShare
from dspark_store.sources.chat import ChatSource
from dspark_store.sources.dummy import DummySource
from dspark_store.sources.identity import chat_template_sha256, tokenizer_sha256
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.registry import SourceContext, SourceSpec, build_source, parse_source, source_names
from dspark_store.sources.source import Sample, Source, SourceError
from dspark_store.sources.template import apply_chat_template_option

__all__ = [
    "Blend",
    "BlendPart",
    "ChatOptions",
    "ChatSource",
    "DummySource",
    "PartShare",
    "Sample",
    "Source",
    "SourceContext",
    "SourceError",
    "SourceSpec",
    "apply_chat_template_option",
    "build_source",
    "chat_template_sha256",
    "parse_source",
    "source_names",
    "tokenizer_sha256",
]
