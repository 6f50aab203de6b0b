"""``python -m dspark_store.evaluate``: tokens a step of the target that a trained draft gives."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dspark_store.cli.options import OneLineParser
from dspark_store.cli.progress import Bar
from dspark_store.evaluation.decoder import Decoder
from dspark_store.evaluation.judgement import Judgement, judge, judge_sampled, prompts_of
from dspark_store.evaluation.sampling import Sampler
from dspark_store.precompute.ranks import one_line
from dspark_store.progress import progress_shown_by, start_progress
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.choice import Split, choose_samples
from dspark_store.target.device import COMPUTE_DTYPES, device_named, resolve_compute_dtype
from dspark_store.target.fingerprint import target_fingerprint
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from dspark_store.text import log_to_stderr, say, say_error
from dspark_store.training.checkpoint import (
    CHECKPOINTS,
    DRAFT,
    STATE,
    DamagedCheckpointError,
    check_checkpoint,
    checkpoints,
    load_draft,
    read_state,
)
from dspark_store.training.data import ExpectedStore, check_manifest, target_tables
from dspark_store.training.state import TrainingState

DIFFERS = DAMAGED = 1
USER_ERROR = 2
UNEXPECTED = 3
INTERRUPTED = 130
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0 the texts are the target's own, or drawn at a temperature, 1 one is not, or the checkpoint is damaged, 2 a
    mistake, 3 another error; each of these is told in one line.
    """
    try:
        given = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
        log_to_stderr("WARNING")
        with progress_shown_by(Bar):
            total = evaluate(given)
        for line in summary(total, given.temperature):
            say(line)
        return DIFFERS if total.differing else 0
    except (ValueError, OSError, ImportError) as error:
        say_error(one_line(error))
        return DAMAGED if isinstance(error, DamagedCheckpointError) else USER_ERROR
    except Exception as error:  # noqa: BLE001 - whatever it is, users get one line
        say_error(one_line(error))
        return UNEXPECTED
    except KeyboardInterrupt:
        say("interrupted", out=sys.stderr)
        return INTERRUPTED


def summary(total: Judgement, temperature: float) -> list[str]:
    """Return what a user is told."""
    apart = f"{total.differing} texts differ from the target's own, {total.near_ties} at a near tie"
    return [
        f"{total.tokens_per_step:.3f} tokens a step: {total.tokens:,} tokens in {total.steps:,} steps of the target",
        f"{total.prompts} prompts: {f'drawn at temperature {temperature:g}' if temperature else apart}",
    ]


def evaluate(given: argparse.Namespace) -> Judgement:
    """Decode the prompts with the draft, greedily also without it, and return what came of it.

    ValueError, OSError or ImportError for what a user can get wrong.
    """
    for name in ("samples", "max_new_tokens"):
        if getattr(given, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(given, name)}")
    Sampler(given.temperature, given.seed)  # refuses what cannot be
    found = checkpoints(Path(given.draft) / CHECKPOINTS)
    if not found:
        raise FileNotFoundError(f"{given.draft} has no checkpoint: give the --output-dir of a training")
    check_checkpoint(found[-1], (DRAFT, STATE))
    trained = read_state(found[-1])
    cache = open_cache(given.store)
    source = TargetSource(given.target_model, given.trust_remote_code)
    _refuse_strangers(trained, cache, source)
    prompts = list(prompts_of(cache, _samples(cache, trained.config, given.samples)))
    if not prompts:
        raise ValueError(f"there are no prompts: every sample of {given.store} begins with a supervised token")
    device = device_named(given.device)
    dtype = resolve_compute_dtype(given.dtype, device)
    model = load_target(source, dtype=dtype, device=device)
    draft = load_draft(found[-1], *target_tables(cache, device, dtype))
    decoder, total = Decoder(model, trained.layers), Judgement()
    what = (decoder, draft, prompts, given.max_new_tokens, _stops(model))
    judged = judge_sampled(*what, given.temperature, given.seed) if given.temperature else judge(*what)
    with start_progress("evaluate", len(prompts), "prompts") as progress:
        for one in judged:
            total += one
            progress.advance(1, f"{total.tokens_per_step:.2f} tokens a step")
    return total


def _refuse_strangers(trained: TrainingState, cache: Cache, source: TargetSource) -> None:
    """Raise ValueError unless draft, store and target are of the same target, as far as can be told before loading it.

    Other files of the target's weights are but a warning: they may be the same weights in another format.
    """
    check_manifest(cache.manifest, ExpectedStore.of_target(source, layers=trained.layers))
    stored = cache.manifest.get("target_weights")
    if trained.origin.target_weights != stored:
        raise ValueError(
            f"the draft was trained on a target with weights {trained.origin.target_weights}, the store is of one with "
            f"{stored}: give the store that it was trained from, or another of the same target"
        )
    own = target_fingerprint(source)["weights"]
    if own != stored:
        _log.warning("the store was made from other files than %s has: other weights, or another format", source.model)


def _samples(cache: Cache, config: Mapping[str, Any], count: int) -> list[int]:
    """Return the first samples that the training kept for validation; of all samples, where it kept none."""
    fraction = config.get("validation_fraction", 0.0)
    if not fraction:
        _log.warning("the training kept no samples for validation: these prompts are of samples that it has seen")
    split = Split("validation", fraction, 0) if fraction else None
    return [int(sample) for sample in choose_samples(cache, min_supervised=2, split=split)[:count]]


def _stops(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end the target's texts."""
    configs = (model.generation_config, model.config)
    ends = next((config.eos_token_id for config in configs if getattr(config, "eos_token_id", None) is not None), None)
    return frozenset() if ends is None else frozenset(ends if isinstance(ends, list) else [ends])


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m dspark_store.evaluate",
        description="Measure by speculative decoding how many tokens a step of the target a draft gives.",
    )
    parser.add_argument("draft", help="the --output-dir of a training, whose newest checkpoint is taken")
    parser.add_argument("--target-model", required=True, help="the target: a hub id, a directory, or a .gguf file")
    parser.add_argument(
        "--store", required=True, help="the store: prompts are the beginnings of its validation samples"
    )
    parser.add_argument("--samples", type=int, default=20, help="prompts, at most (default: 20)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens after each prompt (default: 128)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="draw tokens at this temperature (default: 0, the likeliest)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of those draws (default: 0)")
    parser.add_argument("--device", default="", help="where both run: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype", default="fp32", choices=("auto", *COMPUTE_DTYPES), help="what both compute in (default: fp32)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
