"""Small trainings, from a store or from the tiny target that it was made of."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from dspark_store.cli.train import parse_arguments
from dspark_store.training.learner import Learner
from dspark_store.training.loop import train
from tests.precompute.jobs import BATCH_SIZE, LENGTH, SHARD_SIZE

MASK_TOKEN = 287
DRAFT = ("--draft-layers", 2, "--block-size", 3, "--markov-rank", 8, "--num-anchors", 6)
SMALL = (*DRAFT, "--batch-size", 2, "--log-every", 1, "--learning-rate", 3e-3, "--device", "cpu", "--threads", 2)


def flags(output, *more):
    """Flags of a training on the CPU; a later flag wins over an earlier one."""
    return [str(item) for item in ("--output-dir", output, "--mask-token-id", MASK_TOKEN, *SMALL, *more)]


def run(output, *more):
    """Do a training that must succeed; return its directory."""
    config = parse_arguments(flags(output, *more))
    assert train(config) == 0
    return Path(output)


def traced(output, *more):
    """Do a training; return its directory, and for each step the digest of every gradient before it is clipped."""
    steps = []
    update = Learner.update

    def noted(self, pending):
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in self.draft.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.grad.numpy().tobytes())
        steps.append(digest.hexdigest())
        return update(self, pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", noted)
        directory = run(output, *more)
    return directory, steps


def metrics(directory, kind="train"):
    """Return the lines of metrics of one kind."""
    lines = (json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def write_online(path, target, chats, **changes):
    """Write the file of the precompute that `tests.precompute.jobs.arguments` would run."""
    job = {
        "target_model": str(target),
        "input_data": str(chats),
        "batch_size": BATCH_SIZE,
        "shard_size": SHARD_SIZE,
        "seq_length": LENGTH,
        "dtype": "fp32",
        "device": "cpu",
    }
    path.write_text(yaml.safe_dump({**job, **changes}))
    return path
