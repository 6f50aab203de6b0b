"""The target at work: greedily, token by token, or checking blocks that a draft proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dspark_store.draft.anchors import Anchors, Blocks
from dspark_store.draft.model import Draft, head_logits
from dspark_store.evaluation.sampling import Proposal, Sampler
from dspark_store.target.capture import TargetCapture
from dspark_store.target.facts import head_facts, target_weights


def propose(draft: Draft, states: Tensor, token: int, sampler: Sampler) -> Proposal:
    """Return K tokens after ``token``, each drawn given the one before it.

    ``states`` (1, S, L * H) are those of the S tokens before ``token``, in the draft's dtype.
    """
    size, device = draft.settings.block_size, states.device
    with torch.inference_mode():
        hidden = draft.hidden(states, _one_block(states.shape[1], token, size, device))[0, 0]
        logits = draft.head_logits(hidden)
        tokens: list[int] = []
        rows: list[Tensor] = []
        state: Tensor | None = None
        for slot in range(size):
            scores = logits[slot]
            if draft.markov is not None:
                previous = torch.tensor(tokens[-1] if tokens else token, device=device)
                bias, state = draft.markov.step(previous, hidden[slot], state)
                scores = scores + bias
            rows.append(sampler.probabilities(scores))
            tokens.append(sampler.draw(rows[-1]))
        return Proposal(tokens, torch.stack(rows))


def _one_block(position: int, token: int, size: int, device: torch.device) -> Blocks:
    """Return one block at a position, of which nothing but its first token is known."""
    anchors = Anchors(torch.tensor([[position]], device=device), torch.ones((1, 1), dtype=torch.bool, device=device))
    unknown = torch.zeros((1, 1, size), dtype=torch.int64, device=device)
    previous = unknown.clone()
    previous[0, 0, 0] = token
    return Blocks(anchors, unknown, previous, unknown, unknown.bool())


@dataclass(frozen=True, slots=True)
class Greedy:
    """Tokens that the target chose one by one, and by how much each was ahead of the second best, in logits."""

    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True, slots=True)
class Speculated:
    """Tokens that came of proposals, and the target's steps after the one over the prompt."""

    tokens: list[int]
    steps: int


class Decoder:
    """A target that goes on with prompts. ``layer_ids`` are the layers that the draft was trained on, in its order."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        facts = head_facts(model)
        captured = sorted(layer_ids)
        self._capture = TargetCapture(model, captured)
        self._order = [captured.index(layer) for layer in layer_ids]
        _, self._head, self._bias = target_weights(model)
        self._scale = cast("float | None", facts["logit_scale"])
        self._cap = cast("float | None", facts["final_logit_softcapping"])
        self._device = self._head.device
        self._config = model.config

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in."""
        return self._head.dtype

    def greedy(self, prompt: Sequence[int], limit: int, stop: frozenset[int] = frozenset()) -> Greedy:
        """Choose up to ``limit`` tokens one by one, ending with one of ``stop``."""
        past = DynamicCache(config=self._config)
        tokens: list[int] = []
        margins: list[float] = []
        given = list(prompt)
        while len(tokens) < limit and not (tokens and tokens[-1] in stop):
            logits, _ = self._run(given, past, 1)
            best = logits[-1].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            given = tokens[-1:]
        return Greedy(tokens, margins)

    def speculate(
        self,
        draft: Draft,
        prompt: Sequence[int],
        limit: int,
        stop: frozenset[int] = frozenset(),
        sampler: Sampler | None = None,
    ) -> Speculated:
        """Choose up to ``limit`` tokens by letting the draft propose and the target check, a block at a time.

        Without a sampler they are the ones of `greedy`. ValueError for a target whose cache cannot be cut back to what
        was accepted.
        """
        sampler = sampler or Sampler()
        past = DynamicCache(config=self._config)
        # else a sliding window forgets what a cut would bring back
        past.activate_past_recording()  # type: ignore[no-untyped-call]
        logits, states = self._run(prompt, past, 1)
        tokens, steps = [sampler.draw(sampler.probabilities(logits[-1]))], 0
        while len(tokens) < limit and tokens[-1] not in stop:
            proposal = propose(draft, states.to(draft.embed.dtype), tokens[-1], sampler)
            length = states.shape[1]
            logits, more = self._run([tokens[-1], *proposal.tokens], past, 1 + len(proposal.tokens))
            fresh = sampler.judge(proposal, sampler.probabilities(logits))
            self._cut(past, length + len(fresh))
            states = torch.cat([states, more[:, : len(fresh)]], dim=1)
            ends = [place for place, token in enumerate(fresh) if token in stop]
            tokens += fresh[: ends[0] + 1] if ends else fresh
            steps += 1
        return Speculated(tokens[:limit], steps)

    def _run(self, ids: Sequence[int], past: DynamicCache, judged: int) -> tuple[Tensor, Tensor]:
        """Go on with S ids; return the logits (judged, V) of the last ones, and all captured layers (1, S, L * H)."""
        given = torch.tensor([list(ids)], device=self._device)
        seen = int(past.get_seq_length()) + given.shape[1]
        with torch.inference_mode():
            states = self._capture(given, torch.ones((1, seen), dtype=torch.int64, device=self._device), past)
            logits = head_logits(states.last[0, -judged:], self._head, self._bias, self._scale, self._cap)
            return logits, torch.cat([states.layers[slot] for slot in self._order], dim=2)

    def _cut(self, past: DynamicCache, length: int) -> None:
        try:
            past.crop(length - int(past.get_seq_length()))
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"a {self._config.model_type} target cannot be cut back to accepted tokens: {error}"
            ) from error
        if int(past.get_seq_length()) != length:
            raise ValueError(f"a {self._config.model_type} target cannot be cut back to accepted tokens")
