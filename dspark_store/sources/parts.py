"""The parts of a blend: read as users write them, named, opened with the job's settings, and mixed."""

import glob
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.blend import Blend, BlendPart
from dspark_store.sources.registry import (
    SourceContext,
    SourceSpec,
    SpecValue,
    build_source,
    is_number,
    nearest_of,
    parse_source,
    shortened,
)
from dspark_store.sources.schedules import check_weights, megatron_requests
from dspark_store.sources.source import SourceError

_log = logging.getLogger(__name__)
_PAIR = 2
_PART_KEYS = ("source", "weight", "name")


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a blend. Its weight is None where the blend gives none; an empty name is chosen by the blend."""

    source: SourceSpec
    weight: float | None = None
    name: str = ""


def parse_parts(value: SpecValue) -> list[PartSpec]:
    """Read the parts of a blend.

    The forms are text `0.3 a 0.7 b`, whose paths hold no white space; a flat list `[0.3, a, 0.7, b]`; a list of pairs
    `[[0.3, a], [0.7, b]]`; a list of sources without weights; and a list of mappings `{weight, source, name}`, of which
    only `source` must be there. Weights are given for all parts or for none.

    Raises:
        SourceError: it is none of these, or a weight is not a finite number of at least 0, or no weight is above 0.

    """
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, Sequence):
        raise SourceError(f"the parts of a blend are a list or text, got {shortened(value)}")
    if not value:
        raise SourceError("a blend has no sources; expected at least one")
    if any(map(_is_part, value)):
        parts = [_part_of_mapping(item, number) for number, item in enumerate(value)]
    elif any(map(_is_list, value)):
        parts = [_part_of_pair(item, number) for number, item in enumerate(value)]
    elif any(map(is_number, value[::_PAIR])):
        if len(value) % _PAIR:
            raise SourceError(f"a blend alternates weights and sources, got {len(value)} items: {shortened(value)}")
        parts = [_part_of_pair(value[at : at + _PAIR], at // _PAIR) for at in range(0, len(value), _PAIR)]
    else:
        parts = [PartSpec(parse_source(item)) for item in value]
    check_weights([part.weight for part in parts])
    return parts


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
    workers = max(1, context.num_workers // len(weighed)) if context.num_workers else 0  # parts are read side by side
    inner = replace(context, max_samples=None, num_workers=workers)
    recorded = _recorded_parts(context.recorded, len(weighed))
    parts = [
        BlendPart(name, build_source(part.source, replace(inner, num_samples=count, recorded=before)), part.weight)
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


def _is_list(value: SpecValue) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_part(value: SpecValue) -> bool:
    return isinstance(value, Mapping) and "type" not in value


def _part_of_mapping(value: SpecValue, number: int) -> PartSpec:
    if not isinstance(value, Mapping) or not _is_part(value):
        raise SourceError(f"part {number} of a blend must be {{weight, source}} as others are, got {shortened(value)}")
    for key in value:
        if key not in _PART_KEYS:
            raise SourceError(f"part {number} of a blend has the unknown key {key!r}; {nearest_of(key, _PART_KEYS)}")
    if "source" not in value:
        raise SourceError(f"part {number} of a blend has no 'source', got {shortened(value)}")
    name = value.get("name") or ""
    if not isinstance(name, str):
        raise SourceError(f"the name of part {number} of a blend must be text, got {name!r}")
    weight = value.get("weight")
    return PartSpec(parse_source(value["source"]), None if weight is None else _weight(weight, number), name)


def _part_of_pair(value: SpecValue, number: int) -> PartSpec:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != _PAIR:
        raise SourceError(f"part {number} of a blend must be [weight, source] as others are, got {shortened(value)}")
    return PartSpec(parse_source(value[1]), _weight(value[0], number))


def _weight(value: SpecValue, number: int) -> float:
    if not is_number(value):
        raise SourceError(f"the weight of part {number} of a blend must be a number, got {shortened(value)}")
    return float(value)  # type: ignore[arg-type] # a number, or the text of one
