"""A store takes states of one equality class, unless told otherwise."""

from dataclasses import replace

import pytest
import torch

from dspark_store.format.schema import STATE_LEDGER
from dspark_store.format.storage import LocalStorage
from dspark_store.precompute.equality import check_equality_class, equality_class
from dspark_store.target.parallel import ParallelPlan
from tests.writers.small_store import small_record

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


def with_a_shard(storage):
    storage.put(f"{STATE_LEDGER}/c.0.0.0", b"a row")
    return storage


@pytest.mark.parametrize(
    "plan", [ParallelPlan(1), ParallelPlan(4), ParallelPlan(2, fsdp=2), ParallelPlan(2, ep=2), ParallelPlan(2, pp=2)]
)
def test_whatever_gives_the_bits_of_one_device_is_one_class(plan):
    assert equality_class(plan, CPU) == "cpu exact"


def test_devices_and_tensor_parallelism_are_classes_of_their_own():
    assert equality_class(ParallelPlan(1), CUDA) == "cuda exact"
    assert equality_class(TP2, CPU) == "cpu tp2-fp32"


def test_another_class_is_refused_by_both_names(storage):
    expected = "begun in the equality class 'cpu exact' and this run is in 'cpu tp2-fp32'.*--mix-equality-classes"
    with pytest.raises(ValueError, match=expected):
        check_equality_class(with_a_shard(storage), record_by("cpu exact"), TP2, CPU, allow=False)


def test_another_class_is_taken_when_allowed(storage):
    check_equality_class(with_a_shard(storage), record_by("cpu exact"), TP2, CPU, allow=True)


def test_the_same_class_is_taken_in_another_number(storage):
    check_equality_class(with_a_shard(storage), record_by("cpu exact"), ParallelPlan(4), CPU, allow=False)


def test_a_store_without_a_shard_takes_any_class(storage):
    check_equality_class(storage, record_by("cpu exact"), TP2, CPU, allow=False)
