"""States come to the host once each, and not before they have arrived."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dspark_store.precompute.copies import HostCopies, HostCopy
from dspark_store.target.capture import StageStates

CPU = torch.device("cpu")


def states_of(*layers, last=None):
    return StageStates(tuple(range(len(layers))), layers, last)


def test_on_a_cpu_nothing_is_copied_or_cast():
    layer, last = torch.ones(1, 2, 3), torch.zeros(1, 2, 3)
    copies = HostCopies(CPU, torch.bfloat16)
    arrived = copies.start(states_of(layer, last, last=last)).wait()
    assert copies.depth == 0
    assert arrived.slots == (0, 1)
    assert [arrived.layers[0] is layer, arrived.layers[1] is last, arrived.last is last] == [True] * 3


def test_a_stage_has_afterwards_what_it_had_before_if_only_some_layers_or_nothing():
    for states in (states_of(torch.ones(1, 2, 3)), states_of()):
        assert HostCopies(CPU, torch.bfloat16).start(states).wait() == states


def test_a_wait_is_for_every_arrival():
    waited = []
    events = [SimpleNamespace(synchronize=lambda name=name: waited.append(name)) for name in ("one", "other")]
    HostCopy(states_of(), tuple(events)).wait()
    assert waited == ["one", "other"]


class FakeStream:
    """A stream of a device, which writes down what it is asked."""

    def __init__(self, device, calls):
        self.device, self._calls = device, calls

    def wait_stream(self, other):
        self._calls.append(f"{self.device} waits for {other}")

    def record_event(self):
        self._calls.append(f"{self.device} marks")
        return SimpleNamespace(synchronize=lambda: self._calls.append(f"host waits for {self.device}"))


class FakeStates:
    """A tensor on a CUDA device."""

    def __init__(self, values, device, calls):
        self._values, self.device, self._calls = values, torch.device(device), calls

    def to(self, dtype):
        self._calls.append(f"{self.device} casts on {torch.cuda.current_stream(None)}")
        return self._values.to(dtype)

    def record_stream(self, stream):
        self._calls.append(f"kept until {stream.device} has read it")


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for what torch does on CUDA devices; returns what they were asked, in order."""
    calls: list[str] = []
    current, empty = ["the default stream"], torch.empty

    @contextmanager
    def stream(side):
        current.append(f"the side stream of {side.device}")
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(device, calls))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    return calls


def test_on_cuda_states_are_cast_and_copied_on_a_stream_beside_the_one_that_computes(calls):
    copies = HostCopies(torch.device("cuda", 0), torch.bfloat16)
    copy = copies.start(states_of(FakeStates(torch.ones(1, 2, 3), "cuda:0", calls)))
    assert copies.depth == 1
    assert calls == [
        "cuda:0 waits for the default stream",
        "cuda:0 casts on the side stream of cuda:0",
        "kept until cuda:0 has read it",
        "cuda:0 marks",
    ]
    (layer,) = copy.wait().layers
    assert calls[-1] == "host waits for cuda:0"
    assert torch.equal(layer, torch.ones(1, 2, 3, dtype=torch.bfloat16))


def test_a_state_that_is_held_twice_is_copied_once(calls):
    twice = FakeStates(torch.ones(1, 2, 3), "cuda:0", calls)
    arrived = HostCopies(torch.device("cuda", 0), torch.bfloat16).start(states_of(twice, twice, last=twice)).wait()
    assert arrived.layers[0] is arrived.layers[1] is arrived.last
    assert sum("casts" in call for call in calls) == 1


def test_layers_on_several_devices_are_waited_for_on_each(calls):
    layers = [FakeStates(torch.full((1, 2, 3), float(index)), f"cuda:{index}", calls) for index in range(2)]
    copies = HostCopies(torch.device("cuda", 0), torch.float32)
    arrived = copies.start(states_of(*layers, torch.full((1, 2, 3), 2.0))).wait()
    assert [float(layer[0, 0, 0]) for layer in arrived.layers] == [0, 1, 2]
    assert [call for call in calls if "casts" in call] == [
        f"cuda:{index} casts on the side stream of cuda:{index}" for index in range(2)
    ]
    assert calls[-2:] == ["host waits for cuda:0", "host waits for cuda:1"]


def test_a_device_keeps_its_side_stream(calls, monkeypatch):
    streams = [FakeStream(torch.device("cuda", 0), calls)]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.pop())  # a second one would be an error
    copies = HostCopies(torch.device("cuda", 0), torch.float32)
    for _ in range(3):
        copies.start(states_of(FakeStates(torch.ones(1, 2, 3), "cuda:0", calls))).wait()
    assert streams == []
