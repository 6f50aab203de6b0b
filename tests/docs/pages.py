"""The pages of the documentation, and the fenced blocks in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_LANGUAGES = ("bash", "python", "yaml", "toml")
"""Whatever is meant to be pasted is in one of these; outputs are `text`, or in none."""
_BLOCK = re.compile(
    r"^(?:<!-- not run by the tests: (?P<reason>[^>]+) -->\n)?```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def name_of(page: Path) -> str:
    """Return a page's path below the repository."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Command:
    """One line of a shell block: its words, and the exit code that the comment behind it announces, else 0."""

    words: list[str]
    exit_code: int


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the line of its page that it begins in, counted from 0, and why it is not run, if it is not."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> Iterator[Command]:
        """The lines of a shell block, without comments and empty ones."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            announced = re.search(r"# exit code (\d)", line)
            if words:
                yield Command(words, int(announced[1]) if announced else 0)


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the blocks of a page in some languages, the ones that are not run too."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(name_of(page), text[: match.start("text")].count("\n"), match["language"], match["text"], match["reason"])
        for match in _BLOCK.finditer(text)
        if match["language"] in languages
    ]


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages."""
    return [block for page in PAGES for block in blocks(page, *languages)]
