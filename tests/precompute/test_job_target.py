"""Where a rank runs the target, on a device of its own; and which ways of running it give the same bits."""

from dataclasses import replace

import pytest
import torch

from dspark_store.cli.precompute import parse_arguments
from dspark_store.format.schema import STATE_LEDGER
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.capture import check_equality_class
from dspark_store.precompute.job_target import JobTarget, equality_class, rank_device
from dspark_store.precompute.ranks import World
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.watch import Watch
from dspark_store.target.parallel import ParallelPlan
from tests.writers.small_store import small_record

REQUIRED = ("--target-model", "org/target", "--input-data", "chats.jsonl", "--output-dir", "store")


@pytest.fixture
def gpus(monkeypatch):
    """Pose as a host of 4 GPUs; what is done to them is kept in order."""
    done: list[str] = []
    zeros = torch.zeros

    def make(*shape, device):
        done.append(f"tensor on {device}")
        return zeros(*shape)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"set {device}"))
    monkeypatch.setattr(torch, "zeros", make)
    return done


def settings(*flags):
    return parse_arguments([*REQUIRED, *flags])


def world(size, local_rank):
    return World(0, size, local_rank, Keys(), Watch(0, 1, None))


def test_a_rank_touches_no_device_but_its_own(gpus):
    target = JobTarget(settings(), world(8, 3), ParallelPlan(8), None)
    assert target.device == torch.device("cuda", 3)
    assert gpus == ["set cuda:3", "tensor on cuda:3"]


def test_planning_touches_no_device(gpus):
    assert settings("--device", "cuda:1").resolved_device == torch.device("cuda", 1)
    assert settings().resolved_backend == "nccl"
    assert gpus == []


@pytest.mark.parametrize(
    ("flags", "size", "local_rank", "device"),
    [((), 1, None, "cuda"), (("--device", "cuda:2"), 1, None, "cuda:2"), (("--device", "cuda:2"), 2, 0, "cuda:2")],
)
def test_a_process_that_is_alone_on_its_host_takes_the_device_that_it_is_told(gpus, flags, size, local_rank, device):
    assert rank_device(settings(*flags), world(size, local_rank)) == torch.device(device)
    assert gpus[-1] == f"tensor on {device}"


@pytest.mark.parametrize(
    ("flags", "local_rank", "message"),
    [
        ((), None, "LOCAL_RANK is not set, so this rank's CUDA device is not known: start the job with torchrun"),
        (("--device", "cuda:0"), 1, "'cuda:0' is one for 2 or more processes on this host: give --device cuda"),
        ((), 4, "LOCAL_RANK is 4 on a host of 4 CUDA devices: start one process a device"),
        ((), -1, "LOCAL_RANK is -1 on a host of 4 CUDA devices"),
    ],
)
def test_ranks_that_would_share_a_device_are_refused_before_it_is_touched(gpus, flags, local_rank, message):
    with pytest.raises(ValueError, match=message):
        rank_device(settings(*flags), world(2, local_rank))
    assert gpus == []


def test_a_device_that_is_not_there_is_named_with_the_last_that_is(gpus):
    with pytest.raises(ValueError, match=r"'cuda:4' is not there: torch sees 4 CUDA devices; use --device cuda:3 or"):
        _ = settings("--device", "cuda:4").resolved_device


def test_a_device_that_cannot_be_used_is_named(gpus, monkeypatch):
    def fail(*shape, device):
        raise RuntimeError("all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(ValueError, match="device 'cuda:1' cannot be used: torch cannot make a tensor on it"):
        rank_device(settings(), world(2, 1))


def test_ranks_on_a_cpu_need_no_number():
    assert rank_device(settings("--device", "cpu"), world(2, None)) == torch.device("cpu")


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
TP2 = ParallelPlan(2, tp=2, reduce_dtype="fp32")


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


def record_by(*classes):
    """Return the record of a store to which jobs of these equality classes have written, the last one unnamed."""
    record = small_record()
    producers = tuple({"host": "x", "equality_class": name} for name in classes)
    return replace(record, schema=record.schema.settled(4), producers=({"host": "old"}, *producers))


def test_whatever_gives_the_bits_of_one_device_is_one_class_of_its_kind_of_device():
    for plan in (ParallelPlan(4), ParallelPlan(2, fsdp=2), ParallelPlan(2, ep=2), ParallelPlan(2, pp=2)):
        assert equality_class(plan, CPU) == "cpu exact"
    assert equality_class(ParallelPlan(1), CUDA) == "cuda exact"
    assert equality_class(TP2, CPU) == "cpu tp2-fp32"


def test_another_class_is_refused_by_both_names_unless_it_is_allowed_or_there_is_no_shard(storage):
    record = record_by("cpu exact")
    check_equality_class(storage, record, equality_class(TP2, CPU), allow=False)
    storage.put(f"{STATE_LEDGER}/c.0.0.0", b"a row")
    expected = "begun in the equality class 'cpu exact' and this run is in 'cpu tp2-fp32'.*--mix-equality-classes"
    with pytest.raises(ValueError, match=expected):
        check_equality_class(storage, record, equality_class(TP2, CPU), allow=False)
    check_equality_class(storage, record, equality_class(TP2, CPU), allow=True)
    check_equality_class(storage, record, equality_class(ParallelPlan(4), CPU), allow=False)
