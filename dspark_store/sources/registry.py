"""Sources by name: how one is asked for, in every form that users write, and how it is built.

A builder is a function `build(context, *, option, ...)` that returns a `Source`. Its keyword parameters are the options
that a specification may give; those without a default must be given, and a value is checked against the annotation as
far as that is made of plain types. One that is `**options: Annotated[object, Options]` has the fields of the dataclass
`Options`, or of several, as well; each may be None. A package registers one under a name in the
entry-point group `dspark_store.sources`. Nothing is imported before its name is asked for.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.settings import nearest
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.source import Source, SourceError
from dspark_store.sources.template import todays_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


type SpecValue = JsonValue | PathLike[str] | Sequence["SpecValue"] | Mapping[str, "SpecValue"]
"""What a user may write for a source: text, a path, a mapping, or a list that is a blend."""
type Builder = Callable[..., Source]

_PAIR = 2
ENTRY_POINT_GROUP = "dspark_store.sources"
_TYPE_NAMES: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "none",
    Sequence: "a list",
    Mapping: "a mapping",
}
_BUILT_IN: Mapping[str, tuple[str, str]] = {
    "blend": ("dspark_store.sources.parts", "build_blend"),
    "chat": ("dspark_store.sources.chat", "build_chat"),
    "dummy": ("dspark_store.sources.dummy", "build_dummy"),
    "megatron": ("dspark_store.sources.megatron.source", "build_megatron"),
    "tokens": ("dspark_store.sources.chat", "build_tokens"),
}


@dataclass(frozen=True, slots=True)
class OwnOrder:
    """Options that a source may give itself, and that win over the job's; see `SourceContext`."""

    split: str | None
    shuffle_seed: int | None


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source by the name of its type, with its options as the user gave them."""

    type: str
    options: Mapping[str, SpecValue] = field(default_factory=dict)


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

    def taking(self, options: dict[str, Any], own: type) -> "SourceContext":
        """Return what the job says with those of a source's options, which win and are taken out, that `own` has."""
        return replace(self, **{item.name: options.pop(item.name) for item in fields(own) if item.name in options})

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
            raise SourceError(f"a source must have a 'type', got {shortened(value)}; for example type: chat")
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


def type_of_path(path: str) -> str:
    """Return the type of source that a path without a type is: `megatron` for an index pair, else `chat`."""
    if path.endswith((".bin", ".idx")) or Path(f"{path}.idx").exists():
        return "megatron"
    return "chat"


def nearest_of(name: str, known: Iterable[str]) -> str:
    """Return how a message goes on after an unknown name: the nearest known one, and all of them."""
    names = sorted(known)
    return f"the nearest is {nearest(name, names)!r}; there are {', '.join(names)}" if names else "there are none"


def _of_path(path: str) -> SourceSpec:
    if not path.strip():
        raise SourceError("a source is an empty path; expected a file, a data set or a mapping with a 'type'")
    return SourceSpec(type_of_path(path), {"path": path})


def _is_blend_text(text: str) -> bool:
    words = text.split()
    return len(words) >= _PAIR and is_number(words[0]) and not Path(text).exists()


def is_number(value: SpecValue) -> bool:
    """Tell whether a value is a number, or the text of one."""
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float)


def shortened(value: object) -> str:
    """Return a value for a message, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def source_names() -> list[str]:
    """Return the names that a specification may have, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def build_source(spec: SourceSpec, context: SourceContext) -> Source:
    """Build the source that a specification names.

    Raises:
        SourceError: the name or an option is unknown, an option is missing or of another type, or the source refuses
            what it is given.
        ImportError: the source needs a package that is not installed.

    """
    builder = _find(spec.type)
    _check_options(spec, builder)
    return builder(context, **spec.options)


def _find(name: str) -> Builder:
    registered = _registered(name)
    if name in _BUILT_IN:
        if registered:
            raise SourceError(f"source type {name!r} of {_package(registered[0])} has the name of a built-in one")
        module, function = _BUILT_IN[name]
        builder: Builder = getattr(import_module(module), function)
        return builder
    if not registered:
        raise SourceError(f"source type {name!r} is unknown; {nearest_of(name, source_names())}")
    if len(registered) > 1:
        packages = " and ".join(sorted(_package(point) for point in registered))
        raise SourceError(f"source type {name!r} is registered by {packages}; uninstall all but one")
    loaded = registered[0].load()
    if not callable(loaded):
        raise SourceError(f"source type {name!r} of {_package(registered[0])} is no function, but {loaded!r}")
    return loaded  # type: ignore[no-any-return] # another package's word for it


def _registered(name: str) -> list[EntryPoint]:
    """Return the entry points of a name. One that is installed twice over, and says the same, counts once."""
    return list({point.value: point for point in entry_points(group=ENTRY_POINT_GROUP, name=name)}.values())


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _check_options(spec: SourceSpec, builder: Builder) -> None:
    parameters = inspect.signature(builder).parameters.values()
    options = {item.name: item for item in parameters if item.kind is item.KEYWORD_ONLY}
    try:
        hints = get_type_hints(builder, include_extras=True)
    except NameError:  # of a type that is imported for type checkers only
        hints = {}
    rest = next((item.name for item in parameters if item.kind is item.VAR_KEYWORD), None)
    shared = _shared_options(hints.pop(rest, None)) if rest else {}
    if not rest or shared:
        known = {**options, **shared}
        for name in spec.options:
            if name not in known:
                raise SourceError(f"a source of type {spec.type!r} has no option {name!r}; {nearest_of(name, known)}")
    missing = [name for name, item in options.items() if item.default is item.empty and name not in spec.options]
    if missing:
        raise SourceError(f"a source of type {spec.type!r} needs the option {missing[0]!r}, which is not given")
    hints |= shared
    for name, value in spec.options.items():
        if name in hints and not _fits(value, hints[name]):
            wanted = " or ".join(_type_names(hints[name])) or "another type"
            raise SourceError(f"option {name!r} of a source of type {spec.type!r} is {value!r}; expected {wanted}")


def _shared_options(hint: object) -> dict[str, object]:
    """Return the fields of the dataclasses in the annotation of `**options`, and what each of them may be."""
    kinds = [get_type_hints(options) for options in getattr(hint, "__metadata__", ()) if is_dataclass(options)]
    return {name: Union[kind, None] for options in kinds for name, kind in options.items()}  # noqa: UP007


def _fits(value: object, hint: object) -> bool:
    """Tell whether a value may have a type, as far as the type is a plain one, a sequence of them or one of several."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Sequence:
        if isinstance(value, str) or not isinstance(value, Sequence):
            return False
        return all(_fits(item, get_args(hint)[0]) for item in value)
    if origin is Literal:
        return value in get_args(hint)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def _type_names(hint: object) -> list[str]:
    """Return the names of the types that a user can write."""
    if get_origin(hint) in (Union, UnionType):
        return list(dict.fromkeys(name for one in get_args(hint) for name in _type_names(one)))
    if get_origin(hint) is Literal:
        return [repr(value) for value in get_args(hint)]
    return [_TYPE_NAMES[kind] for kind in (get_origin(hint) or hint,) if kind in _TYPE_NAMES]
