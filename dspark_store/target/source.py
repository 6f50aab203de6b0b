"""Where a target comes from: a hub id, a directory, or a GGUF file."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A model as a user names it.

    `model` is a hub id, a directory in the transformers layout, or the path of a `.gguf` file. `trust_remote_code`
    allows the model's own Python code to run.
    """

    model: str
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Location:
    """A source as transformers wants it: `name` is a hub id or a directory, `gguf_file` a file name in it."""

    name: str
    gguf_file: str | None

    @property
    def directory(self) -> Path | None:
        """The local directory, None for a hub id."""
        path = Path(self.name)
        return path if path.is_dir() else None


def locate(source: TargetSource) -> Location:
    """Tell a hub id, a directory and a GGUF file apart.

    Raises ValueError when `source.model` can only be a path and nothing is there, and ImportError when a GGUF file is
    named without the packages that read it.
    """
    if not source.model:
        raise ValueError("model is empty: expected a hub id, a directory or a .gguf file")
    path = Path(source.model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {source.model!r}: there is no such GGUF file")
        _require_gguf(path)
        return Location(str(path.parent), path.name)
    if path.is_dir():
        return Location(str(path), None)
    if path.is_file():
        raise ValueError(f"model {source.model!r} is a file: expected a hub id, a directory or a .gguf file")
    if source.model.startswith((".", "~", "/")) or source.model.count("/") > 1:
        raise ValueError(f"model {source.model!r}: there is no such directory, and this is not a hub id")
    return Location(source.model, None)


@contextmanager
def one_line_errors(source: TargetSource, what: str) -> Iterator[None]:
    """Turn what transformers raises while it loads `what` into a ValueError of one line that names the model.

    Every exception is meant: for a file that they cannot read the libraries below raise classes of their own, and bare
    Exception.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(_message(source, what, error)) from error


def _message(source: TargetSource, what: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if isinstance(error, KeyError):
        reason = f"there is no entry {reason}"
    if "custom code" in reason and not source.trust_remote_code:
        reason += " Set trust_remote_code to let it run."
    return f"cannot load the {what} of model {source.model!r}: {reason}"


def _require_gguf(path: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"reading {path.name} needs {' and '.join(missing)}, not installed: pip install 'dspark-store[gguf]'"
        )
