"""Placing weights where they will run: transformers does it through accelerate, which not every installation has."""

import importlib.util


def has_accelerate() -> bool:
    """Whether accelerate is installed."""
    return importlib.util.find_spec("accelerate") is not None


def require_accelerate(what: str) -> None:
    """Raise ImportError saying that `what` needs accelerate, and how to install it, where it is not installed."""
    if not has_accelerate():
        raise ImportError(f"{what} needs accelerate, not installed: pip install 'dspark-store[accelerate]'")
