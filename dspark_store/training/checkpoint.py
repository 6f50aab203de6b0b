"""Checkpoints: the draft, the optimizer and the place in the data, from which a training goes on exactly.

Nothing else is needed: anchors are a function of seed, epoch and sample, and no layer draws at random. A checkpoint is
a folder that appears whole, and is never touched again but to be removed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_store.draft.model import Draft
from dspark_store.draft.settings import DraftSettings
from dspark_store.readers.cache import Cache
from dspark_store.training.learner import Learner

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)")
DRAFT, OPTIMIZER, STATE = "draft.safetensors", "optimizer.safetensors", "state.json"
FORMAT_VERSION = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What the states were made of: the digest of the target's weights, and one over the digests of all samples."""

    target_weights: str | None
    samples: str

    @classmethod
    def of(cls, cache: Cache) -> Origin:
        """Return that of a store, or of the live target in its place."""
        weights = cache.manifest.get("target_weights")
        samples = blake2b(cache.index.digest.astype("<u8").tobytes(), digest_size=16).hexdigest()
        return cls(None if weights is None else str(weights), samples)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a training stands, and what it is of: the settings it was given, the draft's shape, layers and states.

    ``window`` holds, for each rank, what the steps since the last line of metrics came to, as `Judged.vector` has it;
    it is empty when no step was taken since.
    """

    step: int
    loader: Mapping[str, int | str]
    draft: DraftSettings
    layers: tuple[int, ...]
    config: Mapping[str, Any]
    origin: Origin
    window: tuple[tuple[float, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return this as what JSON holds."""
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "loader": dict(self.loader),
            "draft": dataclasses.asdict(self.draft),
            "layers": list(self.layers),
            "config": dict(self.config),
            "origin": dataclasses.asdict(self.origin),
            "window": [list(part) for part in self.window],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Place:
        """Read it back; KeyError, TypeError or ValueError when it is not one."""
        return cls(
            state["step"],
            state["loader"],
            DraftSettings(**state["draft"]),
            tuple(state["layers"]),
            state["config"],
            Origin(**state["origin"]),
            tuple(tuple(part) for part in state["window"]),
        )


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the oldest first."""
    found = [(step, path) for path in directory.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int | None:
    """Return the step that a folder's name tells, None when it is no checkpoint's."""
    match = _NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def save_checkpoint(directory: Path, learner: Learner, place: Place, keep: int) -> Path:
    """Write a checkpoint, durable when this returns, and remove all but the ``keep`` newest; return its folder.

    One of the same step is left as it is: a run only ever has that of the step which it began at.
    """
    final = directory / f"step-{place.step:08d}"
    _sweep(directory)
    if final.exists():
        return final
    temporary = _hidden(final)
    temporary.mkdir(parents=True)
    save_file(_contiguous(learner.draft.state_dict()), temporary / DRAFT)
    save_file(_optimizer_tensors(learner), temporary / OPTIMIZER)
    (temporary / STATE).write_text(json.dumps(place.to_json(), indent=2), encoding="utf-8")
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    temporary.rename(final)
    _sync(directory)
    for old in checkpoints(directory)[:-keep]:
        old.rename(_hidden(old))
    _sweep(directory)
    return final


def read_place(checkpoint: Path) -> Place:
    """Read where a checkpoint's training stood; ValueError when it is damaged, or none of this version."""
    with readable(checkpoint):
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        version = state["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"{checkpoint} has format_version {version!r}, expected {FORMAT_VERSION}")
    with readable(checkpoint):
        return Place.from_json(state)


def load_checkpoint(checkpoint: Path, learner: Learner) -> None:
    """Put a checkpoint's draft and optimizer into a learner of the same shape. ValueError when it is damaged."""
    device = str(learner.ranks.device)
    with readable(checkpoint):
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

    ValueError when the tables do not fit it, or the checkpoint is damaged.
    """
    draft = Draft(read_place(checkpoint).draft, embed, head, bias)
    with readable(checkpoint):
        draft.load_state_dict(load_file(checkpoint / DRAFT))
    return draft.to(embed.device, embed.dtype).eval()


def refuse_another(place: Place, own: Place) -> None:
    """Raise ValueError where a checkpoint is of another draft or store; warn of the other settings that differ."""
    if place.origin.samples != own.origin.samples:
        raise ValueError(
            "the checkpoint was trained from a store of other samples: give --store the same one, or choose another "
            "--output-dir"
        )
    for name, recorded in _identity(place).items():
        if recorded != (value := _identity(own)[name]):
            raise ValueError(
                f"{name} of the checkpoint is {recorded!r}, this run has {value!r}: go on with the same draft and the "
                "same store, or choose another --output-dir"
            )
    differing = sorted(name for name in own.config if place.config.get(name) != own.config[name])
    if differing:
        _log.warning("settings differ from those that the training was begun with: %s", ", ".join(differing))


def _identity(place: Place) -> dict[str, object]:
    weights = place.origin.target_weights
    return {**dataclasses.asdict(place.draft), "layers": list(place.layers), "target_weights": weights}


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Turn what is raised about files that are not as they were written into a ValueError that names the folder."""
    try:
        yield
    except (FileNotFoundError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"checkpoint {checkpoint} is damaged ({type(error).__name__}: {reason}): remove that folder to "
            "go on from the one before"
        ) from error


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.draft.named_parameters():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = cast(Tensor, value)
    return _contiguous(tensors)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _hidden(checkpoint: Path) -> Path:
    """Return what a checkpoint is called before it is whole, and while it is removed."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def _sweep(directory: Path) -> None:
    """Remove what a run that was killed left half written or half removed."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
