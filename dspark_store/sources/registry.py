"""Sources by name: those of this package, and those that other packages register.

A builder is a function `build(context, *, option, ...)` that returns a `Source`. Its keyword parameters are the options
that a specification may give; those without a default must be given, and a value is checked against the annotation as
far as that is made of plain types. One that is `**options: Annotated[object, Options]` has the fields of the dataclass
`Options` as well, each of which may be None, which is one not given. A package registers one under a name in the
entry-point group `dspark_store.sources`. Nothing is imported before its name is asked for.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from dspark_store.sources.source import Source, SourceError
from dspark_store.sources.specs import SourceContext, SourceSpec, nearest

ENTRY_POINT_GROUP = "dspark_store.sources"

type Builder = Callable[..., Source]

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
    "chat": ("dspark_store.sources.chat_spec", "build_chat"),
    "dummy": ("dspark_store.sources.dummy", "build_dummy"),
    "megatron": ("dspark_store.sources.megatron.source", "build_megatron"),
    "tokens": ("dspark_store.sources.chat_spec", "build_tokens"),
}


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
        raise SourceError(f"source type {name!r} is unknown; {nearest(name, source_names())}")
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
                raise SourceError(f"a source of type {spec.type!r} has no option {name!r}; {nearest(name, known)}")
    missing = [name for name, item in options.items() if item.default is item.empty and name not in spec.options]
    if missing:
        raise SourceError(f"a source of type {spec.type!r} needs the option {missing[0]!r}, which is not given")
    hints |= shared
    for name, value in spec.options.items():
        if name in hints and not _fits(value, hints[name]):
            wanted = " or ".join(_type_names(hints[name])) or "another type"
            raise SourceError(f"option {name!r} of a source of type {spec.type!r} is {value!r}; expected {wanted}")


def _shared_options(hint: object) -> dict[str, object]:
    """Return the fields of the dataclass in the annotation of `**options`, and what each of them may be."""
    options = next(filter(is_dataclass, getattr(hint, "__metadata__", ())), None)
    return {name: Union[kind, None] for name, kind in get_type_hints(options).items()} if options else {}  # noqa: UP007


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
