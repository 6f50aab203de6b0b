"""Checkpoints: the draft, the optimizer and the place in the data, from which a training goes on exactly.

Nothing else is needed: anchors are a function of seed, epoch and sample, and no layer draws at random. A checkpoint is
a folder that appears whole.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings
from dspark_store.training.learner import Learner

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)")
DRAFT, OPTIMIZER, STATE = "draft.safetensors", "optimizer.safetensors", "state.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training stands, and what it is of: the settings it was given, the draft's shape and the layers."""

    step: int
    loader: Mapping[str, int | str]
    draft: DraftSettings
    layers: tuple[int, ...]
    config: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return this as what JSON holds."""
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "loader": dict(self.loader),
            "draft": dataclasses.asdict(self.draft),
            "layers": list(self.layers),
            "config": dict(self.config),
        }


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def save_checkpoint(directory: Path, learner: Learner, place: Place, keep: int) -> Path:
    """Write a checkpoint, durable when this returns, and remove all but the ``keep`` newest; return its folder."""
    name = f"step-{place.step:08d}"
    temporary, final = directory / f".{name}.tmp", directory / name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(_contiguous(learner.draft.state_dict()), temporary / DRAFT)
    save_file(_optimizer_tensors(learner), temporary / OPTIMIZER)
    (temporary / STATE).write_text(json.dumps(place.to_json(), indent=2), encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    if final.exists():  # of a run that went past here before, and was resumed from an older one
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(directory)
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def read_place(checkpoint: Path) -> Place:
    """Read where a checkpoint's training stood; ValueError when it is none of this version."""
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    if state.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{checkpoint} has format_version {state.get('format_version')!r}, expected {FORMAT_VERSION}")
    draft = DraftSettings(**state["draft"])
    return Place(state["step"], state["loader"], draft, tuple(state["layers"]), state["config"])


def load_checkpoint(checkpoint: Path, learner: Learner) -> None:
    """Put a checkpoint's draft and optimizer into a learner of the same shape."""
    device = str(learner.ranks.device)
    learner.draft.load_state_dict(load_file(checkpoint / DRAFT, device=device))
    saved = load_file(checkpoint / OPTIMIZER, device=device)
    for name, parameter in learner.draft.named_parameters():
        names = [key for key in saved if key.startswith(f"{name}/")]
        state = {key.removeprefix(f"{name}/"): saved[key] for key in names}
        if "step" in state:
            state["step"] = state["step"].cpu()
        learner.optimizer.state[parameter] = state
    learner.step = read_place(checkpoint).step


def load_draft(checkpoint: Path, embed: Tensor, head: Tensor, bias: Tensor | None) -> Draft:
    """Build the draft of a checkpoint between the target's tables, on their device and of their dtype.

    ValueError when the tables do not fit it.
    """
    draft = Draft(read_place(checkpoint).draft, embed, head, bias)
    draft.load_state_dict(load_file(checkpoint / DRAFT))
    return draft.to(embed.device, embed.dtype).eval()


def refuse_another(place: Place, draft: DraftSettings, layers: tuple[int, ...], config: Mapping[str, Any]) -> None:
    """Raise ValueError where a checkpoint is of another draft; warn of the other settings that differ."""
    recorded, own = dataclasses.asdict(place.draft), dataclasses.asdict(draft)
    recorded["layers"], own["layers"] = list(place.layers), list(layers)
    for name in own:
        if recorded.get(name) != own[name]:
            raise ValueError(
                f"{name} of the checkpoint is {recorded.get(name)!r}, this run has {own[name]!r}: go on with the same "
                "draft, or choose another --output-dir"
            )
    differing = sorted(name for name in config if place.config.get(name) != config[name])
    if differing:
        _log.warning("settings differ from those that the training was begun with: %s", ", ".join(differing))


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.draft.named_parameters():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = cast(Tensor, value)
    return _contiguous(tensors)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
