"""The settings of a draft's trial."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.settings import flag, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Everything that a trial needs to know. The names are the flags' names with underscores."""

    draft: str = setting("the --output-dir of a training, whose newest checkpoint is taken", positional=True)
    target_model: str = setting("the target: a hub id, a directory, or a .gguf file", group="target")
    store: str = setting("the store: prompts are the beginnings of its validation samples", group="data")
    samples: int = setting("prompts, at most", 20, group="data")
    max_new_tokens: int = setting("tokens after each prompt", 128, group="answers")
    temperature: float = setting("draw tokens at this temperature; 0 takes the likeliest", 0.0, group="answers")
    seed: int = setting("seed of those draws", 0, group="answers")
    device: str = setting("where both run: cuda where there is one, else cpu", "", group="target")
    dtype: str = setting("what both compute in", "fp32", choices=("auto", *CACHE_DTYPES), group="target")
    trust_remote_code: bool = setting("let the target's repository run its own code", False, group="target")

    def check(self) -> None:
        """Raise ValueError naming the first setting that cannot be."""
        for name in ("samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{flag(name)} must be >= 1, got {getattr(self, name)}")
