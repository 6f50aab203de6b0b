"""Settings of a job: fields of a frozen dataclass, filled from flags and YAML by the same code.

Needs neither torch nor any room of the package, so that ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KINDS = {bool: "true or false", int: "a whole number", float: "a finite number"}
OWN_METADATA = ("help", "group", "least", "positive", "convert", "expected", "nullable")
"""What a field's metadata has beside argparse's options of its flag."""


def setting(group: str, help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:  # noqa: A002, ANN401 - argparse's name; a field's default
    """Make the field of a settings dataclass that a flag or a file sets.

    Args:
        group: of flags in ``--help``; empty for an argument without a flag.
        help: what ``--help`` says.
        default: the value where none is given; without one the setting is required.
        **metadata: ``least`` value, or ``positive``, or ``choices``, for `check_settings`; ``convert``, which makes the
            value out of a plain one, and ``expected``, which says what that takes; ``nullable``, if null is a value of
            its own and not the default; the rest are argparse's.

    """
    return dataclasses.field(default=default, metadata={"group": group, "help": help, **metadata})


def settings_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass that a flag or a file sets, by name, required ones first."""
    known = [field for field in dataclasses.fields(kind) if "help" in field.metadata]
    known.sort(key=lambda field: field.default is not dataclasses.MISSING)
    return {field.name: field for field in known}


def flag(name: str) -> str:
    """Return how a setting is written on the command line, without the two dashes before it."""
    return name.replace("_", "-")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like ``word``; there must be one."""
    return difflib.get_close_matches(word, sorted(known), 1, cutoff=0.0)[0]


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Read a mapping of settings, with underscores for dashes in names; ValueError for any other file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"configuration file {path} does not exist") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"configuration file {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"configuration file {path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"configuration file {path} must be a mapping of settings, not {type(values).__name__}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def fill_settings[T](kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass of settings from plain values, converting each to its setting's type.

    Raises:
        ValueError: a name is no setting, with the nearest that is one; a required setting is missing; or a value is of
            another kind.

    """
    known = settings_of(kind)
    for name in values:
        if name not in known:
            raise ValueError(f"unknown setting {name!r}; the nearest known one is {nearest(name, known)!r}")
    missing = [name for name in known if known[name].default is dataclasses.MISSING and values.get(name) is None]
    if missing:
        raise ValueError(f"required but not given: {', '.join('--' + flag(name) for name in missing)}")
    return kind(**{name: convert_setting(known[name], value) for name, value in values.items()})


def check_settings(config: DataclassInstance) -> None:
    """Raise ValueError naming the first setting that is below its least, not positive and finite, or no choice."""
    for name, known in settings_of(type(config)).items():
        value, least, choices = getattr(config, name), known.metadata.get("least"), known.metadata.get("choices")
        if value is not None and least is not None and value < least:
            raise ValueError(f"{flag(name)} must be >= {least}, got {value}")
        if value is not None and "positive" in known.metadata and not 0 < value < math.inf:
            raise ValueError(f"{flag(name)} must be a finite number > 0, got {value}")
        if choices and value not in (known.default, *choices):
            raise ValueError(f"{flag(name)} must be one of {', '.join(choices)}, got {value!r}")


def convert_setting(setting: dataclasses.Field[Any], value: object, called: str = "") -> object:
    """Convert a value from YAML or a flag to the setting's type.

    ValueError naming the setting, or what the file calls it, when the value is of another kind or not finite.
    """
    if value is None and setting.default is not dataclasses.MISSING:
        return None if "nullable" in setting.metadata else setting.default
    convert, expected = setting.metadata.get("convert"), setting.metadata.get("expected")
    if convert and not expected:
        return convert(value)  # its own errors say what it takes
    try:
        return convert(value) if convert else _converted(setting, value)
    except (TypeError, ValueError, OverflowError) as error:
        expected = expected or _expected(setting)
        raise ValueError(f"{called or f'setting {setting.name!r}'} cannot be {value!r}: expected {expected}") from error


def kind_of(setting: dataclasses.Field[Any]) -> Callable[[Any], object]:
    """Return what makes the setting's value out of a flag's text."""
    own: Callable[[Any], object] | None = setting.metadata.get("type")
    number = re.search(r"\b(int|float)\b", str(setting.type))
    return own or (str if number is None else {"int": int, "float": float}[number[0]])


def whole_number(value: object) -> int:
    """Return a whole number or the text of one as an int; TypeError or ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _converted(setting: dataclasses.Field[Any], value: object) -> object:
    if setting.metadata.get("nargs"):
        return tuple(whole_number(item) for item in (value if isinstance(value, list | tuple) else [value]))
    if isinstance(setting.default, bool):
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool | list | dict):
        raise TypeError
    convert = kind_of(setting)
    if convert is int:
        return whole_number(value)
    made = convert(value)
    if isinstance(made, float) and not math.isfinite(made):
        raise ValueError
    return made


def _expected(setting: dataclasses.Field[Any]) -> str:
    if setting.metadata.get("nargs"):
        return "a list of whole numbers"
    convert = bool if isinstance(setting.default, bool) else kind_of(setting)
    return next((text for known, text in _KINDS.items() if convert is known), "a single text")
