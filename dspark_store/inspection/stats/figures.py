"""The figures on a page: each is looked up in the JSON by its path, and written by one rule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from markupsafe import Markup

from dspark_store.format.jsonvalue import JsonValue

type Form = Literal["number", "percent", "power", "id", "token"]

_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def figure_text(value: JsonValue, form: Form = "number") -> str:
    """Return how a value is written: whole numbers in full, others with four significant digits, null as a dash.

    "percent" is for shares, "power" for exponents of two, "id" for whole numbers that count nothing, "token" for a
    token's text, whose white space is shown.
    """
    if value is None:
        return "–"  # noqa: RUF001 - a dash, no minus
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _token(value) if form == "token" else value
    if not isinstance(value, int | float):
        raise ValueError(f"a figure is a number, a text or null, got {type(value).__name__}")
    if form == "percent":
        return "< 0.01 %" if 0 < value < 0.00005 else f"{100 * value:.2f} %"
    if form == "power":
        return f"2^{value}"
    if form == "id":
        return str(value)
    return f"{value:,}" if isinstance(value, int) else _decimal(value)


def _decimal(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _token(text: str) -> str:
    shown = (_VISIBLE.get(letter, letter) for letter in text)
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in shown)


class Figures:
    """The figures of one document of JSON."""

    def __init__(self, document: Mapping[str, JsonValue]) -> None:
        self._document = document

    def value(self, path: str) -> JsonValue:
        """Return what stands at a path such as ``layers.0.norm.mean``; LookupError where nothing does."""
        value: JsonValue = self._document
        for step in path.split("."):
            if isinstance(value, Mapping):
                value = value[step]
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = value[int(step)]
            else:
                raise LookupError(f"there is nothing at {path}")
        return value

    def number(self, path: str) -> float:
        """Return the number at a path; ValueError where there is another thing."""
        value = self.value(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"there is no number at {path}")
        return float(value)

    def numbers(self, path: str) -> list[float]:
        """Return the list of numbers at a path."""
        return [self.number(f"{path}.{place}") for place in self.places(path)]

    def places(self, path: str) -> range:
        """Return the places of a list, counted from 0."""
        values = self.value(path)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"there is no list at {path}")
        return range(len(values))

    def text(self, path: str, form: Form = "number") -> str:
        """Return the figure at a path as it is written."""
        return figure_text(self.value(path), form)

    def markup(self, path: str, form: Form = "number") -> Markup:
        """Return the figure at a path as HTML, which names the path and the form and holds the whole value."""
        exact = json.dumps(self.value(path))
        return Markup('<data data-json="{}" data-form="{}" value="{}">{}</data>').format(
            path, form, exact, self.text(path, form)
        )
