"""The settings of a draft's trial."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Everything that a trial needs to know. The names are the flags' names with underscores."""

    draft: str = setting("", "the --output-dir of a training, whose newest checkpoint is taken")
    target_model: str = setting("target", "the target: a hub id, a directory, or a .gguf file")
    store: str = setting("data", "the store: prompts are the beginnings of its validation samples")
    samples: int = setting("data", "prompts, at most", 20, least=1)
    max_new_tokens: int = setting("answers", "tokens after each prompt", 128, least=1)
    temperature: float = setting("answers", "draw tokens at this temperature; 0 takes the likeliest", 0.0)
    seed: int = setting("answers", "seed of those draws", 0)
    device: str = setting("target", "where both run: cuda where there is one, else cpu", "")
    dtype: str = setting("target", "what both compute in", "fp32", choices=("auto", *CACHE_DTYPES))
    trust_remote_code: bool = setting("target", "let the target's repository run its own code", False)
