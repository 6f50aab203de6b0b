"""Answers of the target: conversations in its own words, which is what a draft must learn to foresee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_store.settings import check_settings, setting

if TYPE_CHECKING:  # a command that only shows its flags imports this module too
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn: at ``temperature`` 0 the likeliest token, else from the likeliest ``top_p`` of them.

    ``max_new_tokens`` ends an answer that does not end by itself.
    """

    max_new_tokens: int = setting("answers", "where an answer is cut", 320, least=1)
    temperature: float = setting("answers", "0 takes the likeliest token", 0.7, least=0)
    top_p: float = setting("answers", "the share of likely tokens to draw from", 0.95)
    seed: int = setting("answers", "seed of the draws", 42)

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said: ``tokens`` of it, and whether it came to an end of its own."""

    text: str
    tokens: int
    ended: bool


class Answerer:
    """Lets a target answer prompts, some at a time.

    A batch's answers follow from the sampling, its number and its prompts, and from nothing before it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._ends = _end_ids(model, tokenizer)
        pad = tokenizer.pad_token_id
        self._pad = int(pad) if isinstance(pad, int) else (self._ends[0] if self._ends else 0)

    def answer(self, prompts: Sequence[Sequence[int]], batch: int) -> list[Answer]:
        """Return what the target says behind each prompt's tokens; ``batch`` is the number of this batch."""
        import torch

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._pad)
        attention = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left, so that all rows go on at the same place
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            attention[row, longest - len(prompt) :] = 1
        device = self._model.device
        with torch.inference_mode(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._sampling.seed * 1_000_003 + batch)
            generated = self._model.generate(  # type: ignore[operator] # untyped in transformers
                ids.to(device), attention_mask=attention.to(device), generation_config=self._config()
            )
        return [self._read(row.tolist()) for row in generated[:, longest:]]

    def _config(self) -> GenerationConfig:
        from transformers import GenerationConfig

        sampling = self._sampling
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        return GenerationConfig(  # type: ignore[no-untyped-call] # untyped in transformers
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._ends or None,
            pad_token_id=self._pad,
            **(drawn if sampling.temperature else {"do_sample": False}),
        )

    def _read(self, ids: list[int]) -> Answer:
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        said = ids if end is None else ids[:end]
        text = str(self._tokenizer.decode(said, skip_special_tokens=True))
        return Answer(text.strip(), len(said) + (end is not None), end is not None)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end an answer: those of the tokenizer and of the target's generation settings."""
    known = getattr(model.generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))
