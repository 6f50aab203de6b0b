"""``dspark-store precompute``: run a target over a corpus, and write its hidden states as a store."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_store.cli.options import OneLineParser, add_settings, leads, setting_values
from dspark_store.precompute.settings import PrecomputeConfig, config_from, settings
from dspark_store.settings import read_yaml
from dspark_store.sources.registry import read_words
from dspark_store.text import log_to_stderr

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, and a flag for each setting."""
    parser.add_argument(
        "-c", "--config", help="YAML file with these settings (underscores or dashes), or one of Automodel's; flags win"
    )
    add_settings(parser, settings())


def run(given: argparse.Namespace) -> int:
    """Do the job, alone or as one of the ranks that torchrun has started; return 0."""
    config = config_of(given.config, setting_values(given, settings()))
    config.check()
    log_to_stderr(config.log_level, quiet=not leads())
    for note in config.notes:
        _log.info("%s", note)
    if config.estimate:
        from dspark_store.cli.estimate import estimate_precompute

        return estimate_precompute(config)
    from dspark_store.precompute.run import run

    return run(config)


def parse_arguments(arguments: Sequence[str]) -> PrecomputeConfig:
    """Return the settings that a command line gives; raises what `config_of` does."""
    parser = OneLineParser()
    add_arguments(parser)
    given = parser.parse_args(arguments)
    return config_of(given.config, setting_values(given, settings()))


def config_of(path: str | None, given: Mapping[str, Any], **defaults: Any) -> PrecomputeConfig:  # noqa: ANN401 - settings
    """Fill the settings of a precompute from a YAML file, if there is one, and from flags, which win.

    A file with the key ``recipe_args`` was written for NeMo Automodel and is understood as such; its keys that have no
    meaning here are listed in ``notes``.

    Args:
        path: the file, None where there is none.
        given: flags by their settings' names, None for one that is not given.
        **defaults: required settings that are used where neither file nor flags have them.

    Raises:
        ValueError: an unknown key in the file (with the nearest known one), a value that cannot be, or a required
            setting that is missing.
        OSError: the file cannot be read.

    """
    flags = {name: value for name, value in given.items() if value is not None}
    if "input_data" in flags:
        flags["input_data"] = read_words(flags["input_data"])
    document = read_yaml(Path(path)) if path else {}
    if "recipe_args" not in document:
        return config_from({**defaults, **_behind(document, flags), **flags})
    from dspark_store.compat.automodel_yaml import has_own_order, settings_of
    from dspark_store.format.storage import LocalStorage

    values, notes = settings_of(document, flags)
    config = config_from({**defaults, **_behind(values, flags), **flags})
    if "order" not in flags and has_own_order(LocalStorage(config.output_dir)):
        config = dataclasses.replace(config, order=None)
        notes = [*notes, f"the store in {config.output_dir} has its rows in our own order, and is gone on with in it"]
    return dataclasses.replace(config, notes=tuple(f"{path}: {note}" for note in notes))


def _behind(values: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says, without its bound of a batch where a flag gives one, of whichever kind."""
    bounds = {"batch_size", "batch_tokens"}
    return {name: value for name, value in values.items() if name not in bounds or not bounds & flags.keys()}
