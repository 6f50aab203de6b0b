"""The flags of every benchmark, apart from what it measures, so that help imports neither torch nor zarr."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CODECS = ("none", "fast", "default", "dense")
WRITER_PARTS = ("memory", "rates", "cost", "idle", "peers")

type Flag = tuple[str, dict[str, Any]]


def _flag(name: str, help: str, **options: object) -> Flag:  # noqa: A002 - as argparse calls it
    """Return a flag; a default that is a number or a word is told in its help."""
    default = options.get("default")
    told = f" (default: {default})" if isinstance(default, int | float | str) else ""
    return name, {"help": help + told, **options}


def _number(name: str, help: str, default: float | None = None) -> Flag:  # noqa: A002 - as above
    return _flag(name, help, type=float if isinstance(default, float) else int, default=default)


def _path(name: str, help: str, **options: object) -> Flag:  # noqa: A002 - as above
    return _flag(name, help, type=Path, **options)


def _switch(name: str, help: str) -> Flag:  # noqa: A002 - as above
    return _flag(name, help, action="store_true")


def _several(name: str, help: str, **options: object) -> Flag:  # noqa: A002 - as above
    return _flag(name, help, nargs="+", **{"type": int, "default": [], **options})


_JSON = _path("--json", "file to write the outcome to")
_PLACE = _path("--place", "directory to write in (default: a temporary one)")
_STORE = _path("--store", "a finished store with real states (default: synthetic ones)")
_TRAINING = "a complete store; flags of `dspark_store.train` follow behind --"

FLAGS: dict[str, tuple[Flag | str, ...]] = {
    "chunk_sizes": (
        "states",
        _path("--store", "a finished store (default: demo/store, which `make demo` leaves)"),
        _flag("--target", "a small target to make states with; needs --input-data"),
        _path("--input-data", "chats for the target"),
        _flag("--sample-mb", "at most so many MB of states (default: 64, quick 24)", type=float),
        "what the store is for",
        _flag("--storage-rate", "MB per second of storage (default: measured in --place)", type=float),
        _number("--cores", "cores that read and decode (default: those of this machine)"),
        _number("--num-samples", "samples of the planned store (default: those of the store)"),
        "what is tried",
        _several("--codec", "codec presets (default: all)", type=str, choices=CODECS),
        _several("--chunk-tokens", "T (default: 32 to S, doubling)"),
        _several("--shard-size", "R (default: 16 64 256)"),
        _several("--layers-per-chunk", "L, of a sweep (default: 1 and K)"),
        "how",
        _switch("--sweep", "measure every setting, then the recommended beside them"),
        _switch("--quick", "few settings and rounds: under 3 minutes with --sweep"),
        _number("--rounds", "rounds of reading (default: 7, quick 3)"),
        _path("--out", "directory of the results (default: bench)", default=Path("bench")),
        _PLACE,
    ),
    "demo": (_path("directory", "what `benchmarks.fetch_target` filled; the store is made in it", metavar="DIR"),),
    "drafts": (
        _several("stores", _TRAINING + "; of several, the first one is exact", type=str, metavar="STORE"),
        _flag("--out", "where the trainings go, a directory for each store and seed", default="bench/drafts"),
        _several("--seeds", "seeds, a training each (default: 1 2 3)", default=[1, 2, 3]),
        _path("--fp8", "also train from the first store in FP8: a copy of it is made here"),
        _flag("--until", "width of a 95 %% interval from which on no more seeds are used", type=float, default=0.02),
        _JSON,
    ),
    "estimate": (_path("store", "a complete store whose target and data still lie where it says", metavar="STORE"),),
    "gpu": (_switch("--tiny", "a tiny target, on the CPU where there is no GPU"), _PLACE),
    "info": (_PLACE, _number("--repeats", "runs of each", 5)),
    "loader_scale": (_PLACE, _JSON),
    "loaders": (
        _STORE,
        _number("--width", "H of synthetic states (default: 576 and 2560)"),
        _number("--seq-length", "S of synthetic states (default: 512 and 1024)"),
        _number("--samples", "samples (default: 64, and 32 where H is 2560; 80 of a store)"),
        _number("--epochs", "most epochs of a contender over a link", 5),
        _switch("--quick", "small states and one epoch"),
        _switch("--epochs-only", "measure epochs, not writing or some layers only"),
        _PLACE,
        _JSON,
    ),
    "online": (_flag("store", _TRAINING),),
    "ratios": (_path("store", "a finished store of float32 states", metavar="STORE"), _JSON),
    "report": (
        _path("--from", "folder of JSON (default: bench)", dest="source", default=Path("bench")),
        _path("--to", "page (default: docs/benchmarks.md)", default=Path("docs/benchmarks.md")),
    ),
    "tokenise": (
        _number("--chats", "chats to make", 200_000),
        _number("--workers", "processes that tokenise", 2),
        _flag("--tokenizer", "a directory with a tokenizer; one is trained otherwise"),
        _switch("--untagged", "a template without generation tags"),
        _JSON,
    ),
    "verify": (
        _path("store", "a complete store, in place of synthetic ones", nargs="?"),
        _number("--threads", "threads that verify", 2),
        _number("--repeats", "runs of each", 7),
    ),
    "writers": (
        _number("--width", "H, the hidden size", 4096),
        _flag("--codec", "codec preset", default="default"),
        _number("--repeats", "alternating runs", 7),
        _number("--tokens-per-second", "rate of the cost's forward", 500.0),
        _number("--samples", "samples of 128 tokens per run of the cost", 64),
        _number("--gigabytes", "bytes of states that peers write as well", 2.0),
        _flag("--only", "measure one thing (default: all)", choices=WRITER_PARTS),
        _PLACE,
        _JSON,
    ),
}
"""By program: its flags, under the headings that are strings."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return what reads the command line of a program; its description is the docstring of its module."""
    text = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")))
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text, formatter_class=formatter)
    group: argparse._ActionsContainer = parser
    for flag in FLAGS[name]:
        if isinstance(flag, str):
            group = parser.add_argument_group(flag)
        else:
            group.add_argument(flag[0], **flag[1])
    return parser


def parsed(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line of a program."""
    return parser_of(name).parse_args(arguments)


def print_help(name: str) -> None:
    """Print the help of a program and exit, where its flags stand here."""
    if name in FLAGS:
        parser_of(name).print_help()
        sys.exit(0)
