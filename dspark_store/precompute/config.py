"""Where the job's settings come from: flags, a YAML file of ours, or one that was written for NeMo Automodel."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dspark_store.compat.automodel_yaml import has_own_order, is_upstream, settings_of
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.arguments import OneLineParser, flag, nearest
from dspark_store.precompute.settings import PrecomputeConfig, convert_setting, kind, settings
from dspark_store.sources.specs import read_words

__all__ = [
    "PrecomputeConfig",
    "add_settings",
    "config_from",
    "config_of",
    "fill_settings",
    "parse_arguments",
    "read_yaml",
]


def parse_arguments(arguments: Sequence[str]) -> PrecomputeConfig:
    """Fill the settings from flags, and from the YAML file that ``-c`` names; a flag wins over the file.

    A file with the key ``recipe_args`` was written for NeMo Automodel and is understood as such; what it names in vain
    is told in ``notes``. ValueError for an unknown key in the file (with the nearest known one), a value that cannot be
    or a required setting that is missing; OSError when the file cannot be read.
    """
    given = vars(_parser().parse_args(arguments))
    return config_of(given.pop("config"), given)


def config_of(path: str | None, given: Mapping[str, Any], **defaults: Any) -> PrecomputeConfig:  # noqa: ANN401 - settings
    """Fill the settings from a YAML file, if there is one, and from flags, where None stands for one not given.

    ``defaults`` stand for required settings that are in neither. Raises what `parse_arguments` does.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    if "input_data" in flags:
        flags["input_data"] = read_words(flags["input_data"])
    document = read_yaml(Path(path)) if path else {}
    if not is_upstream(document):
        return config_from({**defaults, **document, **flags})
    values, notes = settings_of(document, flags)
    config = config_from({**defaults, **values, **flags})
    if "order" not in flags and has_own_order(LocalStorage(config.output_dir)):
        config = dataclasses.replace(config, order=None)
        notes = [*notes, f"the store in {config.output_dir} has its rows in our own order, and is gone on with in it"]
    return dataclasses.replace(config, notes=tuple(f"{path}: {note}" for note in notes))


def config_from(values: Mapping[str, Any]) -> PrecomputeConfig:
    """Build the settings from plain values, converting each to its setting's type."""
    return PrecomputeConfig(**fill_settings(values, settings()))


def fill_settings(values: Mapping[str, Any], known: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """Convert plain values to the types of the settings of their names.

    ValueError for a name that is none, with the nearest that is one, or a required setting that is missing.
    """
    for name in values:
        if name not in known:
            raise ValueError(f"unknown setting {name!r}; the nearest known one is {nearest(name, known)!r}")
    missing = [name for name in known if known[name].default is dataclasses.MISSING and values.get(name) is None]
    if missing:
        raise ValueError(f"required but not given: {', '.join('--' + flag(name) for name in missing)}")
    return {name: convert_setting(known[name], value) for name, value in values.items()}


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


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m dspark_store.precompute",
        description="Run a frozen target once over a corpus and write its hidden states as a Zarr store.",
    )
    add_settings(parser)
    return parser


def add_settings(
    parser: argparse.ArgumentParser,
    known: Mapping[str, dataclasses.Field[Any]] = settings(),
    file_help: str = "YAML file with these settings (underscores or dashes), or one of Automodel's; flags win",
) -> None:
    """Add ``--config``, and a flag for each setting, None where it is not given; by default those of a precompute."""
    parser.add_argument("-c", "--config", help=file_help)
    add_flags(parser, known)


def add_flags(parser: argparse.ArgumentParser, known: Mapping[str, dataclasses.Field[Any]]) -> None:
    """Add a flag for each setting, None where it is not given."""
    for name, setting in known.items():
        metadata = dict(setting.metadata)
        text = metadata.pop("help")
        metadata.pop("convert", None)
        if isinstance(setting.default, bool):
            parser.add_argument(f"--{flag(name)}", action="store_true", default=None, help=text)
            continue
        if setting.default not in (dataclasses.MISSING, None, "", ()):
            text += f" (default: {setting.default})"
        metadata["type"] = str if name == "shuffle_seed" else kind(setting)
        parser.add_argument(f"--{flag(name)}", default=None, help=text, **metadata)
