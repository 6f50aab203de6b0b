"""``dspark-store train``: train a draft from a store, with no target loaded, or online from a live target."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_store.cli.options import OneLineParser, add_settings, exit_code_of, leads, setting_values
from dspark_store.cli.precompute import config_of as precompute_config_of
from dspark_store.settings import fill_settings, read_yaml, settings_of
from dspark_store.text import log_to_stderr
from dspark_store.training.settings import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, and a flag for each setting."""
    parser.add_argument("-c", "--config", help="YAML file with these settings (underscores or dashes); flags win")
    add_settings(parser, settings_of(TrainConfig))


def run(given: argparse.Namespace) -> int:
    """Train, alone or as one of the ranks that torchrun has started; return 0."""
    known = settings_of(TrainConfig)
    try:
        config = config_of(given.config, setting_values(given, known))
    except (ValueError, OSError) as error:
        if leads():
            raise
        return exit_code_of(error)  # all ranks were given the same
    log_to_stderr(config.log_level, quiet=not leads())
    from dspark_store.training.loop import train
    from dspark_store.training.ranks import ToldError

    try:
        return train(config)
    except ToldError as error:  # another rank has told it
        return exit_code_of(error.__cause__)


def parse_arguments(arguments: Sequence[str]) -> TrainConfig:
    """Return the settings that a command line gives; raises what `config_of` does."""
    parser = OneLineParser()
    add_arguments(parser)
    given = parser.parse_args(arguments)
    return config_of(given.config, setting_values(given, settings_of(TrainConfig)))


def config_of(path: str | None, given: Mapping[str, Any]) -> TrainConfig:
    """Fill the settings of a training from a YAML file, if there is one, and from flags, which win.

    Args:
        path: the file, None where there is none.
        given: flags by their settings' names, None for one that is not given.

    Raises:
        ValueError: an unknown key in a file (with the nearest known one), a value that cannot be, or a required
            setting that is missing.
        OSError: a file cannot be read.

    """
    flags = {name: value for name, value in given.items() if value is not None}
    document = read_yaml(Path(path)) if path else {}
    config = fill_settings(TrainConfig, {**document, **flags})
    config.check()
    if config.online is None:
        return config
    live = precompute_config_of(config.online, {"output_dir": str(config.tokens_dir)})
    return dataclasses.replace(config, live=live)
