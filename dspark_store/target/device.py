"""Devices and dtypes by the names that users give them."""

from __future__ import annotations

from typing import cast

import torch

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What a target may compute in, by the names that settings have for it."""


def device_named(name: str | None) -> torch.device:
    """Return the device of a name, without one CUDA where there is any; ValueError when there is none of that name.

    Nothing is allocated on a CUDA device, which may be another rank's.
    """
    name = name or default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown: expected cpu, cuda or cuda:N") from error
    if device.type == "cuda":
        _check_cuda(device)
    elif not can_hold_tensors(device):
        raise ValueError(f"device {name!r} is not there: torch cannot make a tensor on it; use --device cpu")
    return device


def default_device() -> str:
    """Return cuda where there is one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn auto, bf16, fp16 or fp32 into a dtype; auto is bfloat16 on CUDA and float32 elsewhere.

    Raises ValueError for any other name.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"compute dtype {name!r} is unknown: expected one of auto, {', '.join(COMPUTE_DTYPES)}")
    return COMPUTE_DTYPES[name]


def index_of(device: torch.device) -> int | None:
    """Return a device's index, None where it names just the kind of device."""
    return cast("int | None", device.index)  # torch's stubs know no None


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise ValueError(f"device '{device}' is not there: torch sees no CUDA device; use --device cpu")
    count = torch.cuda.device_count()
    index = index_of(device)
    if index is not None and index >= count:
        raise ValueError(
            f"device '{device}' is not there: torch sees {count} CUDA devices; use --device cuda:{count - 1} or less"
        )


def can_hold_tensors(device: torch.device) -> bool:
    """Make a tensor on a device, whose CUDA context this begins; tell whether that can be done."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return device.type != "meta"
