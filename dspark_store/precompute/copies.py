"""Copying states off the device while the next batch is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dspark_store.target.capture import StageStates


class _Event(Protocol):
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HostCopy:
    """States on their way to the host; ``wait`` blocks until they are there and returns them."""

    states: StageStates
    arrivals: tuple[_Event, ...] = ()

    def wait(self) -> StageStates:
        """Return the states on the CPU."""
        for arrival in self.arrivals:
            arrival.synchronize()
        return self.states


class HostCopies:
    """Starts copies of captured states to the host.

    On CUDA they are cast to the cache dtype on the device, which halves what is moved, and copied into pinned memory on
    a stream beside the one that computes, so that the next forward need not wait: ``depth`` copies may be on their
    way. Each device that holds some of a target's layers has such a stream. On a CPU there is nothing to copy, and the
    cast is left to the encoder threads.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.depth = 1 if device.type == "cuda" else 0

    def start(self, states: StageStates) -> HostCopy:
        """Start a copy. A state that is held twice is copied once."""
        tensors = [*states.layers, *(() if states.last is None else (states.last,))]
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda")
        for device in devices:
            self._stream(device).wait_stream(torch.cuda.current_stream(device))
        copied = _mapped(states, self._copy)
        return HostCopy(copied, tuple(self._stream(device).record_event() for device in devices))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _copy(self, states: torch.Tensor) -> torch.Tensor:
        if states.device.type == "cpu":
            return states
        if states.device.type != "cuda":
            return states.to(self._dtype).cpu()
        stream = self._stream(states.device)
        with torch.cuda.stream(stream):
            cast = states.to(self._dtype)
            states.record_stream(stream)  # not to be given away before it was read
            host = torch.empty(cast.shape, dtype=cast.dtype, pin_memory=True)
            return host.copy_(cast, non_blocking=True)


def _mapped(states: StageStates, copy: Callable[[torch.Tensor], torch.Tensor]) -> StageStates:
    """Apply ``copy`` to each state; one that stands in two places is copied once, and stands in both again."""
    copies: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy(tensor)
        return copies[id(tensor)]

    last = None if states.last is None else once(states.last)
    return StageStates(states.slots, tuple(once(layer) for layer in states.layers), last)
