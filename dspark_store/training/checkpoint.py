"""Checkpoints: the draft, the optimizer and the place in the data, from which a training goes on exactly.

Nothing else is needed: anchors are a function of seed, epoch and sample, and no layer draws at random. A checkpoint is
a folder that appears whole, with the digests of its files, and is never touched again but to be renamed or removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_store.draft.model import Draft
from dspark_store.format.files import sync_path
from dspark_store.training.learner import Learner
from dspark_store.training.ranks import Ranks
from dspark_store.training.settings import TrainConfig
from dspark_store.training.state import FORMAT_VERSION, TrainingState

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)")
CHECKPOINTS = "checkpoints"
"""The folder in a training's output directory."""
DRAFT, OPTIMIZER, STATE = "draft.safetensors", "optimizer.safetensors", "state.json"
FILES = (DRAFT, OPTIMIZER, STATE)
SUMS = "SHA256SUMS"
"""The digests of the other files, as ``sha256sum -c`` reads them."""
WITHOUT_SUMS = 2
"""The version whose checkpoints have no digests."""
_UNREADABLE = (FileNotFoundError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError)
_STATE_BYTES = 64 * 1024 * 1024


class DamagedCheckpointError(ValueError):
    """A checkpoint's files are not what was written; the message names it, what is wrong, and the newest whole one."""

    exit_code = 1


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the oldest first."""
    found = [(step, path) for path in directory.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int | None:
    """Return the step that a folder's name tells, None when it is no checkpoint's."""
    match = _NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def found_checkpoint(config: TrainConfig, ranks: Ranks) -> Path | None:
    """Return the checkpoint to resume from, the newest or the named one; None where there is none.

    All ranks call it together. ValueError when there are some and the run is not to resume, when the named one is
    not there, or when ranks find different ones; DamagedCheckpointError when it is not what was written.
    """
    found = checkpoints(Path(config.output_dir) / CHECKPOINTS)
    named = config.resume_from
    chosen = found[-1] if found else None
    if named is not None:
        chosen = next((path for path in found if path.name == named), None)
    own = None if chosen is None else step_of(chosen)
    steps = ranks.gathered(torch.tensor([-1 if own is None else own], device=ranks.device))
    least, most = min(map(int, steps)), max(map(int, steps))
    if least != most:
        raise ValueError(
            f"ranks find different newest checkpoints in {config.output_dir}, of step {least} and of step {most}, "
            "-1 for none: --output-dir must be on a file system that all of them share"
        )
    if named is not None and chosen is None:
        there = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{config.output_dir} has no checkpoint {named!r} to go on from; there are: {there}")
    if found and not config.resume and named is None:
        raise ValueError(f"{config.output_dir} has checkpoints: pass --resume to go on, or choose another --output-dir")
    with ranks.together():
        if ranks.leads and chosen is not None:
            check_checkpoint(chosen)
    return chosen


def save_checkpoint(
    directory: Path,
    learner: Learner,
    state: TrainingState,
    keep: int,
    *,
    spared: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint, durable when this returns, and remove all but the ``keep`` newest; return its folder.

    If the checkpoint of this step exists, it is left unchanged. Those that are ``spared``, by name, are not removed.
    ``check`` is called before anything is made visible or removed, and may raise to stop. OSError when the disk is full
    or fails. Whatever is raised, nothing of the checkpoint is left.
    """
    check()
    final = directory / f"step-{state.step:08d}"
    _sweep(directory)
    if final.exists():
        return final
    temporary = _hidden(final)
    directory.mkdir(parents=True, exist_ok=True)
    sync_path(directory.parent)  # of the metrics, too
    try:
        temporary.mkdir()
        _write_files(temporary, learner, state)
        check()
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(directory)
    for old in [old for old in checkpoints(directory) if old.name not in spared][:-keep]:
        old.rename(_hidden(old))
    _sweep(directory)
    return final


def set_aside(directory: Path, step: int, others: Sequence[Path] = ()) -> int | None:
    """Rename the checkpoints after ``step``, whose names a training is to use again, and copy ``others``.

    Nothing is removed: all get the ending ``.aside-N`` with the next free N. Returns N, None where there is nothing.
    """
    later = [path for path in checkpoints(directory) if (step_of(path) or 0) > step]
    if not later and not others:
        return None
    places = {directory, *(path.parent for path in others)}
    taken = (path.name.rpartition(".aside-")[2] for place in places for path in place.glob("*.aside-*"))
    number = 1 + max((int(name) for name in taken if name.isdecimal()), default=0)
    for path in others:
        copy = path.with_name(f"{path.name}.aside-{number}")
        shutil.copyfile(path, copy)
        sync_path(copy)
    for path in reversed(later):  # an interruption leaves the older ones, and the next run begins here again
        path.rename(path.with_name(f"{path.name}.aside-{number}"))
    for place in places:
        sync_path(place)
    return number


def check_checkpoint(checkpoint: Path, names: Collection[str] = FILES, *, warn: bool = True) -> None:
    """Compare files of a checkpoint with their digests, and its step with its name. Warn where there are no digests.

    DamagedCheckpointError, naming the file, when one is not what was written.
    """
    reason, summed = _fault(checkpoint, names)
    if reason:
        raise _damaged(checkpoint, reason)
    if warn and not summed:
        _log.warning("%s was written without digests: whether it is what was written cannot be checked", checkpoint)


def read_state(checkpoint: Path) -> TrainingState:
    """Read where a checkpoint's training stood.

    DamagedCheckpointError when it is damaged, ValueError when it is none of this version.
    """
    with readable(checkpoint):
        version = _state(checkpoint)["format_version"]
    if version not in (FORMAT_VERSION, WITHOUT_SUMS):
        raise ValueError(f"{checkpoint} has format_version {version!r}, expected {FORMAT_VERSION}")
    with readable(checkpoint):
        return _training_state(checkpoint)


def load_checkpoint(checkpoint: Path, learner: Learner) -> None:
    """Put a checkpoint's draft and optimizer into a learner of the same shape. DamagedCheckpointError as it says."""
    device, step = str(learner.ranks.device), read_state(checkpoint).step
    with readable(checkpoint):
        learner.draft.load_state_dict(load_file(checkpoint / DRAFT, device=device))
        saved = load_file(checkpoint / OPTIMIZER, device=device)
        counts = {int(value) for key, value in saved.items() if key.endswith("/step")}
        if max(counts, default=0) != step:
            raise ValueError(f"{OPTIMIZER} has made {max(counts, default=0)} steps, {STATE} says {step}")
        for name, parameter in learner.draft.named_parameters():
            names = [key for key in saved if key.startswith(f"{name}/")]
            state = {key.removeprefix(f"{name}/"): saved[key] for key in names}
            if any(value.shape not in (parameter.shape, ()) for value in state.values()):
                raise ValueError(f"{OPTIMIZER} has another shape of {name}")
            if "step" in state:
                state["step"] = state["step"].cpu()
            learner.optimizer.state[parameter] = state
    learner.step = step


def load_draft(checkpoint: Path, embed: Tensor, head: Tensor, bias: Tensor | None) -> Draft:
    """Build the draft of a checkpoint between the target's tables, on their device and of their dtype.

    ValueError when the tables do not fit it, or the checkpoint is damaged.
    """
    draft = Draft(read_state(checkpoint).draft, embed, head, bias)
    with readable(checkpoint):
        draft.load_state_dict(load_file(checkpoint / DRAFT))
    return draft.to(embed.device, embed.dtype).eval()


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Turn what is raised about files that are not as they were written into a DamagedCheckpointError."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except _UNREADABLE as error:
        raise _damaged(checkpoint, _first_line(error)) from error


def _damaged(checkpoint: Path, reason: str) -> DamagedCheckpointError:
    others = (path for path in reversed(checkpoints(checkpoint.parent)) if path.name != checkpoint.name)
    whole = next((path.name for path in others if _is_whole(path)), None)
    advice = (
        "no other one there is whole: choose another --output-dir"
        if whole is None
        else f"the newest whole one is {whole}, from which a training goes on with --resume-from {whole}"
    )
    return DamagedCheckpointError(f"checkpoint {checkpoint} is damaged: {reason}; {advice}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"


def _is_whole(checkpoint: Path) -> bool:
    try:
        return not _fault(checkpoint, FILES)[0]
    except OSError:
        return False


def _fault(checkpoint: Path, names: Collection[str]) -> tuple[str, bool]:
    """Return what is wrong with files of a checkpoint, empty if nothing is found, and whether they have digests."""
    summed = (checkpoint / SUMS).is_file()
    try:
        missing = [name for name in names if not (checkpoint / name).is_file()]
        if missing:
            return f"{missing[0]} is missing", summed
        known = _read_sums(checkpoint) if summed else {}
        changed = [name for name in names if summed and known[name] != _sum(checkpoint / name)]
        if changed:
            return f"{changed[0]} is not what was written", summed
        version = _state(checkpoint)["format_version"]
        if version == FORMAT_VERSION and not summed:
            return f"{SUMS} is missing", summed
        if version in (FORMAT_VERSION, WITHOUT_SUMS):
            _training_state(checkpoint)
        for name in {DRAFT, OPTIMIZER}.intersection(names):
            with safe_open(checkpoint / name, framework="pt"):
                pass
    except _UNREADABLE as error:
        return _first_line(error), summed
    return "", summed


def _state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE
    if path.stat().st_size > _STATE_BYTES:
        raise ValueError(f"{STATE} has {path.stat().st_size} bytes, expected {_STATE_BYTES} at most")
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


def _training_state(checkpoint: Path) -> TrainingState:
    state = TrainingState.from_json(_state(checkpoint))
    if state.step != step_of(checkpoint):
        raise ValueError(f"{STATE} is of step {state.step}, its folder is named {checkpoint.name}")
    return state


def _write_files(folder: Path, learner: Learner, state: TrainingState) -> None:
    with _disk_errors():
        save_file(_contiguous(learner.draft.state_dict()), folder / DRAFT)
        save_file(_optimizer_tensors(learner), folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(state.to_json(), indent=2), encoding="utf-8")
    sums = "".join(f"{_sum(folder / name)}  {name}\n" for name in FILES)
    (folder / SUMS).write_text(sums, encoding="ascii")
    for path in (*folder.iterdir(), folder):
        sync_path(path)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn what safetensors says of a disk that is full or fails into an OSError with its number."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _read_sums(checkpoint: Path) -> dict[str, str]:
    with (checkpoint / SUMS).open(encoding="ascii", newline="") as file:
        text = file.read(4096)
    lines = [re.fullmatch(r"([0-9a-f]{64})  ([a-z.]+)\n", line) for line in text.splitlines(keepends=True)]
    known = {line[2]: line[1] for line in lines if line}
    if None in lines or tuple(known) != FILES:
        raise ValueError(f"{SUMS} is not what was written")
    return known


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
