"""The parts of a blend: named, opened with the job's settings, and mixed."""

import glob
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.blend import Blend, Part
from dspark_store.sources.registry import build_source
from dspark_store.sources.schedules import megatron_requests
from dspark_store.sources.specs import PartSpec, SourceContext, SpecValue, parse_parts

_log = logging.getLogger(__name__)


def build_blend(
    context: SourceContext,
    *,
    sources: SpecValue,
    schedule: str = "exhaustive",
    samples: int | None = None,
    on_short: str | None = None,
) -> Blend:
    """Build a blend of the parts that `sources` names; see `parse_parts`, and `Blend` for the other options.

    Parts of weight 0 are left out, with a warning, and not even opened. The split and the shuffle of the job are those
    of each part, and its limit of samples is that of the whole.
    """
    given = parse_parts(sources)
    names = _part_names(given)
    weighed = [(name, part) for name, part in zip(names, given, strict=True) if part.weight != 0]
    for name, part in zip(names, given, strict=True):
        if part.weight == 0:
            _log.warning("part %r of the blend has weight 0 and is left out", name)
    wanted = _wanted(schedule, samples, [part.weight for _, part in weighed])
    inner = replace(context, max_samples=None, num_workers=_workers_each(context.num_workers, len(weighed)))
    recorded = _recorded_parts(context.recorded, len(weighed))
    parts = [
        Part(name, build_source(part.source, replace(inner, num_samples=count, recorded=before)), part.weight)
        for (name, part), count, before in zip(weighed, wanted, recorded, strict=True)
    ]
    blend = Blend(
        parts,
        schedule=schedule,  # type: ignore[arg-type] # Blend looks
        samples=samples,
        on_short=on_short,  # type: ignore[arg-type] # and here too
        max_samples=context.max_samples,
    )
    for share in blend.shares():
        _log.info("%s", share)
    return blend


def _recorded_parts(recorded: Mapping[str, JsonValue] | None, count: int) -> Sequence[Mapping[str, JsonValue] | None]:
    """Return the identities of the parts in the store that is gone on with: None in a new one."""
    if recorded is None:
        return [None] * count
    parts = recorded.get("parts")
    known = parts if isinstance(parts, list) and len(parts) == count else [{}] * count  # {}: another blend, refused yet
    return [part if isinstance(part, Mapping) else {} for part in known]


def _wanted(schedule: str, samples: int | None, weights: Sequence[float | None]) -> list[int | None]:
    """Return how many records each part is to have, where it can have any number: what the scheme's project builds."""
    known = [weight for weight in weights if weight is not None]
    if schedule == "exhaustive" or samples is None or isinstance(samples, bool) or not known:
        return [None] * len(weights)
    return [samples] * len(weights) if schedule == "hyper_parallel" else [*megatron_requests(known, samples)]


def _workers_each(workers: int, parts: int) -> int:
    """Share tokenising processes among parts that are read side by side."""
    return max(1, workers // parts) if workers else 0


def _part_names(parts: Sequence[PartSpec]) -> list[str]:
    """Return a name for each part: the given one, else that of its file, else its type, with a number if need be."""
    names: list[str] = []
    for part in parts:
        taken = {*names, *(other.name for other in parts)}
        wished = part.name or _stem(part.source.options.get("path")) or part.source.type
        name, number = wished, 1
        while not part.name and name in taken:
            number += 1
            name = f"{wished} {number}"
        names.append(name)
    return names


def _stem(path: SpecValue) -> str:
    """Return the name of a single file or data set, without suffixes; empty when it is none."""
    if not isinstance(path, str | PathLike) or glob.has_magic(fspath(path)):
        return ""
    return Path(path).name.split(".")[0]
