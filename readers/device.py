"""Copying batches to the device, beside the training step."""

from __future__ import annotations

from typing import Self

import torch


class DeviceCopy:
    """Copies a batch to a CUDA device on a stream of its own; without one it hands the batch on as it is."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # untyped in torch

    @classmethod
    def to(cls, device: torch.device | str | None) -> Self:
        """Return the copy for a device; None and the CPU need none. ValueError for another kind of device."""
        try:
            wanted = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device {device!r} is unknown: expected cpu, cuda or cuda:N") from error
        if wanted is None or wanted.type == "cpu":
            return cls(None)
        if wanted.type != "cuda":
            raise ValueError(f"batches are copied to a CUDA device or stay on the CPU, got device {device!r}")
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} is not there: torch sees no CUDA device")
        return cls(wanted)

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch on the device.

        Runs in the prefetching thread, which waits for its own copy: the pinned block may then be used again, and the
        consumer finds the batch there.
        """
        if self._device is None or self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            copied = {name: values.to(self._device, non_blocking=True) for name, values in batch.items()}
        self._stream.synchronize()
        return copied

    def receive(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hand a copied batch to the consumer's stream, so that its memory waits for what is computed there."""
        if self._device is not None:
            for values in batch.values():
                values.record_stream(torch.cuda.current_stream(self._device))
        return batch
