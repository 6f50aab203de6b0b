"""Running the command in this process, and looking at what it left behind."""

import json
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
import torch

from dspark_store.format.metadata import COPY_KEY
from dspark_store.precompute.__main__ import main
from dspark_store.sources.chat import ChatSource
from dspark_store.sources.identity import without_rules
from dspark_store.target.batches import batches_of

run_module = import_module("dspark_store.precompute.run")  # the package's own `run` is the function
fill_module = import_module("dspark_store.precompute.fill")
sharded_module = import_module("dspark_store.target.sharded")

BATCH_SIZE, SHARD_SIZE, LENGTH = 2, 4, 128
"""Eleven chats are three shards: two batches, two batches, a whole batch and a short one."""


def arguments(target, data, output, *more):
    """Flags of a job on the CPU with an fp32 cache; a later flag wins over an earlier one."""
    required = ("--target-model", target, "--input-data", data, "--output-dir", output, "--device", "cpu")
    sizes = ("--batch-size", BATCH_SIZE, "--shard-size", SHARD_SIZE, "--seq-length", LENGTH, "--dtype", "fp32")
    return [str(item) for item in (*required, *sizes, *more)]


def precompute(target, data, output, *more):
    """Run a job that must succeed; return its store's directory."""
    assert main(arguments(target, data, output, *more)) == 0
    return Path(output)


def interrupted(job, module=fill_module, name="complete_store"):
    """Run a job that is interrupted where ``module`` calls ``name``, by default before its store is declared complete.

    Return the store's directory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, interrupt)
        assert main(job) == 130
    return Path(job[job.index("--output-dir") + 1])


def interrupt(*args, **options):
    raise KeyboardInterrupt


def write_rows(path, rows):
    """Write rows as JSON Lines: a text is one question with that answer, anything else is written as it is."""
    lines = (json.dumps(_chat(row) if isinstance(row, str) else row) + "\n" for row in rows)
    path.write_text("".join(lines))
    return path


def _chat(answer):
    return {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": answer}]}


def states_of_files(directory):
    """Return (inode, time of change) of every file, by path."""
    files = (path for path in Path(directory).rglob("*") if path.is_file())
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def contents(directory):
    """Return every file's bytes by path, except what a store says about who made it, and when."""
    directory = Path(directory)
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    stored: dict[str, object] = {name: path.read_bytes() for name, path in files.items()}
    assert stored.pop(COPY_KEY) == stored["zarr.json"]
    root = json.loads((directory / "zarr.json").read_text())
    for field in ("producers", "seal"):
        del root["attributes"]["dspark_store"][field]
    return {**stored, "zarr.json": root}


def direct_states(model, cache, pad_token_id, limit=BATCH_SIZE):
    """Yield (sample, its K layers (length, H), its last hidden state (length, H)) of plain forwards of ``model``.

    The batches are composed by the rule, from what the store says are the samples' tokens.
    """
    lengths, last_layer = cache.lengths.tolist(), model.config.num_hidden_layers - 1
    for shard in range(cache.schema.tokens.num_shards):
        samples = cache.schema.tokens.rows(shard)
        for batch in batches_of([lengths[sample] for sample in samples], limit):
            members = [samples[row] for row in batch]
            states = _forward(
                model, [cache[sample]["input_ids"][: lengths[sample]] for sample in members], pad_token_id
            )
            for position, sample in enumerate(members):
                layers = [states[layer_id + 1][position, : lengths[sample]] for layer_id in cache.layer_ids]
                yield sample, layers, states[last_layer + 1][position, : lengths[sample]]


def _forward(model, rows, pad_token_id):
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_token_id)
    attention = torch.zeros_like(ids)
    for position, row in enumerate(rows):
        ids[position, : len(row)], attention[position, : len(row)] = row, 1
    with torch.no_grad():
        states = model(ids, attention_mask=attention, output_hidden_states=True, use_cache=False).hidden_states
    return [state.mean(2) if state.dim() == 4 else state for state in states]


def differing_samples(model, cache, pad_token_id, limit=BATCH_SIZE):
    """Return the samples of a store that are not bit by bit what direct forwards give, padding included."""
    compared, differing = [], []
    for sample, layers, last in direct_states(model, cache, pad_token_id, limit):
        item, length = cache[sample], int(cache.lengths[sample])
        expected = (torch.cat(layers, 1).to(cache.dtype), last.to(cache.dtype))
        stored = (item["target_hidden_states"], item["target_last_hidden_states"])
        equal = all(_same_bits(old[:length], new) for old, new in zip(stored, expected, strict=True))
        padded = not any(values[length:].any() for values in (*stored, item["loss_mask"]))
        if not (equal and padded and bool((item["input_ids"][length:] == pad_token_id).all())):
            differing.append(sample)
        compared.append(sample)
    assert sorted(compared) == list(range(len(cache)))
    return sorted(differing)


def _same_bits(left, right):
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def answers(cache, tokenizer):
    """Return the text of every sample's supervised tokens, without the token that ends the turn."""
    ids = (cache[sample]["input_ids"][cache[sample]["loss_mask"] == 1].tolist() for sample in range(len(cache)))
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


def error_lines(text):
    return [line for line in chain(*(part.split("\r") for part in text.split("\n"))) if line.startswith("error: ")]


def refused(job, capsys, *, at_once=False, code=2):
    """Run a job that must be refused; return its line, which is all that it says when it is refused ``at_once``."""
    capsys.readouterr()
    assert main(job) == code
    text = capsys.readouterr().err
    (line,) = error_lines(text)
    assert text.endswith(line + "\n")
    assert "Traceback" not in text
    assert not at_once or text == line + "\n"
    return line


@contextmanager
def rule_1():
    """Let conversations be by rule 1, which identities did not name, for the block: some ids and masks were others."""
    identity, read = ChatSource.identity, ChatSource.read

    def read_otherwise(self, cursor=0):
        for sample in read(self, cursor):
            record = self.record_of(sample.cursor) - 1
            ids = sample.input_ids[: -1 if record == 1 else None]
            mask = sample.loss_mask[: len(ids)].copy()
            mask[-1] = 1 - mask[-1] if record == 5 else mask[-1]
            yield replace(sample, input_ids=ids, loss_mask=mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatSource, "identity", lambda self: without_rules(identity(self)))
        patch.setattr(ChatSource, "read", read_otherwise)
        yield
