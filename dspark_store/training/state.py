"""What a checkpoint says of its training: where it stands, and of which draft, samples and settings it is."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspark_store.draft.settings import DraftSettings
from dspark_store.readers.cache import Cache

_log = logging.getLogger(__name__)
FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True)
class Origin:
    """What the states were made of: the digest of the target's weights, and one over the digests of all samples."""

    target_weights: str | None
    samples: str

    @classmethod
    def of(cls, cache: Cache) -> Origin:
        """Return that of a store, or of the live target in its place."""
        weights = cache.manifest.get("target_weights")
        samples = hashlib.blake2b(cache.index.digest.astype("<u8").tobytes(), digest_size=16).hexdigest()
        return cls(None if weights is None else str(weights), samples)


@dataclass(frozen=True, slots=True)
class TrainingState:
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
            "draft": asdict(self.draft),
            "layers": list(self.layers),
            "config": dict(self.config),
            "origin": asdict(self.origin),
            "window": [list(part) for part in self.window],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> TrainingState:
        """Read it back; KeyError, TypeError or ValueError when it is not one."""
        if type(state["step"]) is not int or not isinstance(state["loader"], dict):
            raise TypeError("its step is no whole number, or its loader no object")
        return cls(
            state["step"],
            state["loader"],
            DraftSettings(**state["draft"]),
            tuple(state["layers"]),
            state["config"],
            Origin(**state["origin"]),
            tuple(tuple(part) for part in state["window"]),
        )


def refuse_another(saved: TrainingState, own: TrainingState) -> None:
    """Raise ValueError where a checkpoint is of another draft or store; warn of the other settings that differ."""
    if saved.origin.samples != own.origin.samples:
        raise ValueError(
            "the checkpoint was trained from a store of other samples: give --store the same one, or choose another "
            "--output-dir"
        )
    for name, recorded in _identity(saved).items():
        if recorded != (value := _identity(own)[name]):
            raise ValueError(
                f"{name} of the checkpoint is {recorded!r}, this run has {value!r}: go on with the same draft and the "
                "same store, or choose another --output-dir"
            )
    differing = sorted(name for name in own.config if saved.config.get(name) != own.config[name])
    if differing:
        _log.warning("settings differ from those that the training was begun with: %s", ", ".join(differing))


def _identity(saved: TrainingState) -> dict[str, object]:
    weights = saved.origin.target_weights
    return {**asdict(saved.draft), "layers": list(saved.layers), "target_weights": weights}
