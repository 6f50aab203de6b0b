"""How a source of tokens is asked for: its specification, in every form that users write, and what it is built in."""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.source import SourceError
from dspark_store.sources.template import todays_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type SpecValue = JsonValue | PathLike[str] | Sequence["SpecValue"] | Mapping[str, "SpecValue"]
"""What a user may write for a source: text, a path, a mapping, or a list that is a blend."""

_PAIR = 2
_PART_KEYS = ("source", "weight", "name")


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source by the name of its type, with its options as the user gave them."""

    type: str
    options: Mapping[str, SpecValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a blend. Its weight is None where the blend gives none; an empty name is chosen by the blend."""

    source: SourceSpec
    weight: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext(ChatOptions):
    """What the settings of a job say to every source; an option of the source itself wins over them.

    Beside what is listed here those are the options of conversations, of which other sources use what they can.

    Attributes:
        seq_length: S, the most tokens of a sample.
        load_tokenizer: gives the tokenizer; it is called once, when a source first needs one. None: there is none.
        vocab_size: ids are below it; None: not known.
        split: None or `name[a:b]`, a slice of each source's records after the shuffle.
        shuffle_seed: of the order of records; None for the order of the data.
        seed: of sources that draw something else.
        max_samples: at most this many records, after shuffle and split; of a blend as a whole.
        num_samples: records wanted of a source that can give any number of them; None for what it has.
        num_workers: processes that tokenise; 0 for this one.
        today: YYYY-MM-DD, which is one date for all sources of a job.
        recorded: the identity of the source in the store that is gone on with; None for a new one.

    """

    seq_length: int
    load_tokenizer: "Callable[[], PreTrainedTokenizerBase] | None" = None
    vocab_size: int | None = None
    split: str | None = None
    shuffle_seed: int | None = 42
    seed: int = 42
    max_samples: int | None = None
    num_samples: int | None = None
    num_workers: int = 0
    today: str = ""
    recorded: Mapping[str, JsonValue] | None = None

    def __post_init__(self) -> None:
        if not self.today:
            object.__setattr__(self, "today", todays_date())
        if self.load_tokenizer is not None:
            object.__setattr__(self, "load_tokenizer", cache(self.load_tokenizer))

    def tokenizer(self, source_type: str) -> "PreTrainedTokenizerBase":
        """Return the tokenizer; SourceError when a source of this type needs one and the job has none."""
        if self.load_tokenizer is None:
            raise SourceError(f"a source of type {source_type!r} needs a tokenizer; name the target model whose it is")
        return self.load_tokenizer()


def parse_source(value: SpecValue) -> SourceSpec:
    """Read a source as a user wrote it.

    Text or a path names a file, files or a data set, whose type follows from the name (see `type_of_path`), or, where
    it is one of `0.3 a 0.7 b`, a blend: at least two words of which the first is a number, unless there is such a
    file. A mapping has a `type` and options. A list is a blend; see `parse_parts`.

    Raises:
        SourceError: it is none of these.

    """
    if isinstance(value, PathLike):
        return _of_path(os.fspath(value))
    if isinstance(value, str):
        return SourceSpec("blend", {"sources": value}) if _is_blend_text(value) else _of_path(value)
    if isinstance(value, Mapping):
        kind = value.get("type")
        if not isinstance(kind, str) or not kind:
            raise SourceError(f"a source must have a 'type', got {_shown(value)}; for example type: chat")
        return SourceSpec(kind, {name: option for name, option in value.items() if name != "type"})
    if isinstance(value, Sequence):
        return SourceSpec("blend", {"sources": value})
    raise SourceError(f"a source is a path, a mapping with a 'type', or a list of parts; got {value!r}")


def read_words(words: Sequence[str]) -> SpecValue:
    """Return the source that a command line's words are: one as a configuration has it, several files, or a blend.

    Raises:
        SourceError: the one word looks like YAML and is not.

    """
    if len(words) > 1:
        is_blend = words[0].replace(".", "", 1).isdecimal()
        return list(words) if is_blend else {"type": "chat", "path": list(words)}
    (word,) = words
    if word.lstrip()[:1] not in ("{", "["):
        return word
    try:
        written: SpecValue = yaml.safe_load(word)
    except yaml.YAMLError as error:
        raise SourceError(f"the source {word!r} is not YAML ({' '.join(str(error).split())})") from error
    return written


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
        raise SourceError(f"the parts of a blend are a list or text, got {_shown(value)}")
    if not value:
        raise SourceError("a blend has no sources; expected at least one")
    if any(_is_part(item) for item in value):
        parts = [_part_of_mapping(item, number) for number, item in enumerate(value)]
    elif any(_is_list(item) for item in value):
        parts = [_part_of_pair(item, number) for number, item in enumerate(value)]
    elif any(_is_number(item) for item in value[::_PAIR]):
        if len(value) % _PAIR:
            raise SourceError(f"a blend alternates weights and sources, got {len(value)} items: {_shown(value)}")
        pairs = zip(value[::_PAIR], value[1::_PAIR], strict=True)
        parts = [PartSpec(parse_source(source), _weight(weight, n)) for n, (weight, source) in enumerate(pairs)]
    else:
        parts = [PartSpec(parse_source(item)) for item in value]
    check_weights([part.weight for part in parts])
    return parts


def check_weights(weights: Sequence[float | None]) -> None:
    """Raise SourceError unless all are None, or all finite, none negative, and at least one above 0."""
    given = [weight for weight in weights if weight is not None]
    if not given:
        return
    if len(given) < len(weights):
        raise SourceError(
            f"part {weights.index(None)} of a blend has no weight, and others have; give a weight to all or to none"
        )
    for number, weight in enumerate(given):
        if not math.isfinite(weight) or weight < 0:
            raise SourceError(f"the weight of part {number} of a blend is {weight}; expected a finite number >= 0")
    if not any(given):
        raise SourceError("every weight of a blend is 0; expected at least one above 0")
    if not math.isfinite(sum(given)):
        raise SourceError(f"the weights of a blend add up to {sum(given)}; give smaller ones")


def type_of_path(path: str) -> str:
    """Return the type of source that a path without a type is: `megatron` for an index pair, else `chat`."""
    if path.endswith((".bin", ".idx")) or Path(f"{path}.idx").exists():
        return "megatron"
    return "chat"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return how a message goes on after an unknown name: the nearest known one, and all of them."""
    names = sorted(known)
    if not names:
        return "there are none"
    near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"the nearest is {(near or names)[0]!r}; there are {', '.join(names)}"


def _of_path(path: str) -> SourceSpec:
    if not path.strip():
        raise SourceError("a source is an empty path; expected a file, a data set or a mapping with a 'type'")
    return SourceSpec(type_of_path(path), {"path": path})


def _is_blend_text(text: str) -> bool:
    words = text.split()
    return len(words) >= _PAIR and _is_number(words[0]) and not Path(text).exists()


def _is_number(value: SpecValue) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float)


def _is_list(value: SpecValue) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_part(value: SpecValue) -> bool:
    return isinstance(value, Mapping) and "type" not in value


def _part_of_mapping(value: SpecValue, number: int) -> PartSpec:
    if not isinstance(value, Mapping) or not _is_part(value):
        raise SourceError(f"part {number} of a blend must be {{weight, source}} as others are, got {_shown(value)}")
    for key in value:
        if key not in _PART_KEYS:
            raise SourceError(f"part {number} of a blend has the unknown key {key!r}; {nearest(key, _PART_KEYS)}")
    if "source" not in value:
        raise SourceError(f"part {number} of a blend has no 'source', got {_shown(value)}")
    name = value.get("name") or ""
    if not isinstance(name, str):
        raise SourceError(f"the name of part {number} of a blend must be text, got {name!r}")
    weight = value.get("weight")
    return PartSpec(parse_source(value["source"]), None if weight is None else _weight(weight, number), name)


def _part_of_pair(value: SpecValue, number: int) -> PartSpec:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != _PAIR:
        raise SourceError(f"part {number} of a blend must be [weight, source] as others are, got {_shown(value)}")
    return PartSpec(parse_source(value[1]), _weight(value[0], number))


def _weight(value: SpecValue, number: int) -> float:
    if not _is_number(value):
        raise SourceError(f"the weight of part {number} of a blend must be a number, got {_shown(value)}")
    return float(value)  # type: ignore[arg-type] # a number, or the text of one


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
