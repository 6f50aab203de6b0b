"""The settings of answers that a target is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_store.settings import setting


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn: at ``temperature`` 0 the likeliest token, else from the likeliest ``top_p`` of them.

    ``max_new_tokens`` ends an answer that does not end by itself.
    """

    max_new_tokens: int = setting("where an answer is cut", 320, group="answers")
    temperature: float = setting("0 takes the likeliest token", 0.7, group="answers")
    top_p: float = setting("the share of likely tokens to draw from", 0.95, group="answers")
    seed: int = setting("seed of the draws", 42, group="answers")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}, expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
