"""Where a training's settings come from: flags, and a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark_store.precompute.arguments import OneLineParser
from dspark_store.precompute.config import add_settings, fill_settings, read_yaml
from dspark_store.training.settings import TrainConfig, settings


def parse_arguments(arguments: Sequence[str]) -> TrainConfig:
    """Fill the settings from flags, and from the YAML file that ``-c`` names; a flag wins over the file.

    ValueError for an unknown key in the file (with the nearest known one), a value that cannot be or a required setting
    that is missing; OSError when the file cannot be read.
    """
    parser = OneLineParser(
        prog="python -m dspark_store.train",
        description="Train a draft from a store, with no target loaded, or online from a live target.",
    )
    add_settings(parser, settings(), "YAML file with these settings (underscores or dashes); flags win")
    given = vars(parser.parse_args(arguments))
    path = given.pop("config")
    flags = {name: value for name, value in given.items() if value is not None}
    document = read_yaml(Path(path)) if path else {}
    return TrainConfig(**fill_settings({**document, **flags}, settings()))
