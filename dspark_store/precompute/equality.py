"""Which ways of running a target give the same bits, and so may add to one store."""

from __future__ import annotations

import torch

from dspark_store.format.ledger import state_ledger
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.storage import Storage
from dspark_store.target.parallel import ParallelPlan


def equality_class(plan: ParallelPlan, device: torch.device) -> str:
    """Name what decides the last bits of a state: the kind of device, and how its sums are split.

    A replicated target, FSDP2, expert parallelism and a pipeline give the bits of one device; tensor parallelism does
    not.
    """
    return f"{device.type} {plan.equality_class}"


def check_equality_class(
    storage: Storage, record: StoreRecord, plan: ParallelPlan, device: torch.device, *, allow: bool
) -> None:
    """Raise ValueError when shards of the store were captured in another class, unless that is allowed."""
    own = equality_class(plan, device)
    others = {str(producer["equality_class"]) for producer in record.producers if "equality_class" in producer} - {own}
    if others and not allow and state_ledger(storage, record.schema).committed():
        raise ValueError(
            f"the store was begun in the equality class {min(others)!r} and this run is in {own!r}: its states may "
            "differ in the last bits; run it as it was begun, or allow that with --mix-equality-classes"
        )
