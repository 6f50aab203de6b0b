"""``dspark-store evaluate``: tokens per step of the target that a trained draft gives."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dspark_store.cli.options import DIFFERENT, add_settings, setting_values
from dspark_store.evaluation.settings import EvaluateConfig
from dspark_store.settings import fill_settings, settings_of
from dspark_store.text import log_to_stderr, say

if TYPE_CHECKING:
    from dspark_store.evaluation.trial import Judgement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_settings(parser, settings_of(EvaluateConfig))


def run(given: argparse.Namespace) -> int:
    """Decode prompts, and print what came of it; return 1 when a text is not the target's own, else 0."""
    config = fill_settings(EvaluateConfig, setting_values(given, settings_of(EvaluateConfig)))
    log_to_stderr("WARNING")
    from dspark_store.evaluation.trial import evaluate

    total = evaluate(config)
    say(*_summary(total, config.temperature))
    return DIFFERENT if total.differing else 0


def _summary(total: Judgement, temperature: float) -> list[str]:
    apart = f"{total.differing} texts differ from the target's own, {total.near_ties} at a near tie"
    return [
        f"{total.tokens_per_step:.3f} tokens per step: {total.tokens:,} tokens in {total.steps:,} steps of the target",
        f"{total.prompts} prompts: {f'drawn at temperature {temperature:g}' if temperature else apart}",
    ]
