"""``dspark-store generate``: conversations in the target's own words, from prompts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dspark_store.cli.options import add_settings, setting_values
from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.progress import start_progress
from dspark_store.settings import fill_settings, settings_of
from dspark_store.target.answers import Sampling
from dspark_store.text import say

if TYPE_CHECKING:
    from dspark_store.sources.rendering import Renderer
    from dspark_store.target.answers import Answer, Answerer

Message = Mapping[str, str]
Row = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "prompts", help="a text file with one prompt per line, or JSON Lines of messages that end with a user's"
    )
    target = parser.add_argument_group("target")
    target.add_argument("--target-model", required=True, help="a hub id, a directory or a .gguf file")
    target.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    target.add_argument(
        "--compute-dtype", default="auto", choices=["auto", *CACHE_DTYPES], help="what is computed in (default: auto)"
    )
    target.add_argument("--trust-remote-code", action="store_true", help="let the target's repository run its own code")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--output", required=True, help="the JSON Lines to write, or to go on with")
    answers.add_argument(
        "--batch-size", type=int, default=16, help="prompts per batch, which the answers depend on (default: 16)"
    )
    add_settings(parser, settings_of(Sampling))


def run(given: argparse.Namespace) -> int:
    """Write an answer for every prompt, batch by batch; an interrupted run goes on where it was. Return 0."""
    if given.batch_size < 1:
        raise ValueError(f"--batch-size is {given.batch_size}, expected at least 1")
    sampling = fill_settings(Sampling, setting_values(given, settings_of(Sampling)))
    origin = {"model": given.target_model, "batch_size": given.batch_size, **asdict(sampling)}
    conversations = read_prompts(Path(given.prompts))
    output = Path(given.output)
    done, size = whole_batches(output, conversations, given.batch_size, origin)
    if done < len(conversations):
        answerer, renderer = _load(given, sampling)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists():
            os.truncate(output, size)
        with (
            output.open("a", encoding="utf-8") as file,
            start_progress("generate", len(conversations), "chats", done) as bar,
        ):
            tokens = 0
            for batch, members in enumerate(batched(conversations[done:], given.batch_size), done // given.batch_size):
                first = batch * given.batch_size + 1
                prompts = [prompt_ids(renderer, member, number) for number, member in enumerate(members, first)]
                answers = answerer.answer(prompts, batch)
                _write(file, members, answers, origin)
                tokens += sum(answer.tokens for answer in answers)
                bar.advance(len(members), f"{tokens:,} new tokens")
    say(f"{len(conversations):,} chats in {output}, {len(conversations) - done:,} of them new")
    return 0


def read_prompts(path: Path) -> list[list[Message]]:
    """Return the conversations to be answered. ValueError, naming file and line, for one that no answer can follow."""
    lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold what else ends a line
    conversations: list[list[Message]]
    if path.suffix not in (".jsonl", ".ndjson"):
        conversations = [[{"role": "user", "content": line.strip()}] for line in lines if line.strip()]
    else:
        conversations = [_messages(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not conversations:
        raise ValueError(f"{path} has no prompts")
    return conversations


def _messages(place: str, line: str) -> list[Message]:
    """Return a row's messages up to the last one of a user: an answer that is there already is left out."""
    try:
        messages = json.loads(line)["messages"]
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        asked = [(row["role"], row["content"]) for row in messages[: users[-1] + 1]]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f'{place} is no row of {{"messages": [...]}} with a message of the role user') from error
    for role, content in asked:
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{place} has a message whose content is no text: {content!r}")
    return [{"role": role, "content": content} for role, content in asked]


def prompt_ids(renderer: Renderer, conversation: Sequence[Message], number: int) -> list[int]:
    """Return the tokens of a conversation up to where the assistant speaks.

    ValueError, with the conversation's number, when the template refuses it, or takes too long or writes too much.
    """
    from dspark_store.sources.limits import ProcessorTimeError, run_limited

    messages = renderer.prepare([dict(message) for message in conversation])
    try:
        text = run_limited(
            lambda: renderer.render(messages, None, generation_prompt=True),
            renderer.limits.seconds,
        )
    except ProcessorTimeError as error:
        raise ValueError(f"prompt {number:,}: the chat template takes {error} to render it; does it end?") from error
    except ValueError as error:
        raise ValueError(f"prompt {number:,}: {error}") from error
    (tokens,) = renderer.tokenise([text])
    ids: list[int] = tokens.ids.tolist()
    return ids


def whole_batches(
    output: Path, conversations: Sequence[Sequence[Message]], batch_size: int, origin: Row
) -> tuple[int, int]:
    """Return how many rows of a file that an earlier run wrote can stay, which are whole batches, and their bytes.

    ValueError when the file is no such one: a row answers another prompt, or was made with other settings.
    """
    if not output.exists():
        return 0, 0
    data = output.read_bytes()
    *rows, half = data.split(b"\n")  # what stands behind the last newline is half a row
    if not rows and not half.startswith(b'{"messages"'[: len(half)]):
        raise ValueError(f"{output} holds no chats: give another --output")
    for number, line in enumerate(rows, 1):
        _check_row(
            f"{output}:{number}", line, conversations[number - 1] if number <= len(conversations) else None, origin
        )
    whole = len(rows) if len(rows) == len(conversations) else len(rows) // batch_size * batch_size
    return whole, sum(len(line) + 1 for line in rows[:whole])


def _check_row(place: str, line: bytes, conversation: Sequence[Message] | None, origin: Row) -> None:
    try:
        row = json.loads(line)
        asked, generated = row["messages"][:-1], row["generated"]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{place} was not written by generate: give another --output") from error
    if conversation is None or asked != list(conversation):
        raise ValueError(f"{place} does not answer the prompt of its place: give another --output")
    if generated != origin:
        raise ValueError(f"{place} was made with {_differences(generated, origin)}: give the same, or another --output")


def _differences(generated: object, origin: Row) -> str:
    """Return the settings of a row that are not those of this run, beside these."""
    made = generated if isinstance(generated, dict) else {}
    names = [name for name in {**made, **origin} if made.get(name) != origin.get(name)]
    return ", ".join(f"{name} {made.get(name)}, not {origin.get(name)}" for name in names)


def _load(given: argparse.Namespace, sampling: Sampling) -> tuple[Answerer, Renderer]:
    from dspark_store.sources.rendering import Renderer
    from dspark_store.target.answers import Answerer
    from dspark_store.target.device import device_named, resolve_compute_dtype
    from dspark_store.target.load import load_target, load_tokenizer
    from dspark_store.target.source import TargetSource

    device = device_named(None if given.device == "auto" else given.device)
    source = TargetSource(given.target_model, given.trust_remote_code)
    tokenizer = load_tokenizer(source)
    renderer = Renderer(tokenizer)
    model = load_target(source, dtype=resolve_compute_dtype(given.compute_dtype, device), device=device)
    return Answerer(model, tokenizer, sampling), renderer


def _write(file: TextIO, members: Sequence[Sequence[Message]], answers: Sequence[Answer], origin: Row) -> None:
    for conversation, answer in zip(members, answers, strict=True):
        messages = [*conversation, {"role": "assistant", "content": answer.text}]
        row = {"messages": messages, "ended": answer.ended, "generated": origin}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
