"""Text for people: sizes, durations, and printing that lets no text of a stranger's store give orders to a terminal.

Control characters, C1 codes, bidirectional overrides and isolates, and other characters that cannot be seen (Unicode's
categories Cc, Cf, Zl, Zp and Cs) are written out as ``\\x1b`` or ``\\u202e``. The joiners U+200C and U+200D stay, since
scripts and emoji need them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import unicodedata
from typing import TextIO

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_FORESEEN = (ValueError, OSError, ImportError, FloatingPointError)
_HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})
_JOINERS = "\u200c\u200d"
_COLOUR = re.compile(r"(\x1b\[(?:0|1|31|32|33)m)")


def visible(text: str, kept: str = "\n\t") -> str:
    """Return the text with what cannot be seen written out, but for the characters ``kept``."""
    if text.isprintable():
        return text
    return "".join(_escape(character) if _is_hidden(character, kept) else character for character in text)


def say(*lines: str, out: TextIO | None = None) -> None:
    """Print lines, to stdout by default; an end of a line inside of one is written out too."""
    _print([visible(line, kept="\t") for line in lines], out)


def show(*texts: str, out: TextIO | None = None) -> None:
    """Print texts of several lines, with the colours that `Colours` gave them; all else is made visible."""
    _print(["".join(_shown(part) for part in _COLOUR.split(text)) for text in texts], out)


def say_json(value: object, out: TextIO | None = None) -> None:
    """Print a JSON value; what cannot be seen stands in it as JSON's own escapes."""
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):  # the whole may be long
        seen = part if part.isprintable() else "\n".join(_json_visible(line) for line in part.split("\n"))
        print(seen, end="", file=sys.stdout if out is None else out)
    _print([""], out)


def say_error(message: object, *, kind: str = "error") -> None:
    """Tell on stderr what went wrong, in one line."""
    say(f"{kind}: {' '.join(str(message).split())}", out=sys.stderr)


def foreseen(error: BaseException) -> bool:
    """Tell whether an error is of a kind whose message says all there is to say."""
    return isinstance(error, _FORESEEN) or hasattr(error, "exit_code")


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, after the name of its kind where it has none or was not foreseen."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = re.sub(r"^\[Errno \d+\] ", "", " ".join(str(error).split()))
    return text if foreseen(error) and text else f"{type(error).__name__}: {text or 'no reason given'}"


def log_to_stderr(level: str, *, quiet: bool = False) -> None:
    """Let what is logged from ``level`` on appear on stderr, made visible; ``quiet`` raises INFO to WARNING."""
    level = "WARNING" if quiet and level == "INFO" else level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def size_text(count: float) -> str:
    """Return bytes as people read them, in powers of 1000."""
    power = 0
    while abs(count) >= 999.5 and power < len(_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 else f"{count:.2f} {_UNITS[power]}"


def time_text(seconds: float) -> str:
    """Return a duration as people read it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _print(texts: list[str], out: TextIO | None) -> None:
    print(*texts, sep="\n", file=sys.stdout if out is None else out, flush=True)


def _shown(part: str) -> str:
    return part if _COLOUR.fullmatch(part) else visible(part)


def _is_hidden(character: str, kept: str) -> bool:
    return (
        not character.isprintable()
        and character not in kept
        and character not in _JOINERS
        and unicodedata.category(character) in _HIDDEN
    )


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_visible(line: str) -> str:
    return "".join(json.dumps(part)[1:-1] if _is_hidden(part, "") else part for part in line)
