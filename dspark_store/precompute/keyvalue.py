"""The little memory that the ranks of a job share: keys and texts, kept by torchrun's rendezvous store."""

from __future__ import annotations

import datetime as dt
import os
from typing import Protocol

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.precompute.rounds import join_round, open_round

_TIMEOUT = dt.timedelta(seconds=60)


class KeyValue(Protocol):
    """Keys and texts that every rank sees. No call waits for a key to appear."""

    def get(self, key: str) -> str | None:
        """Return what is under a key, None when there is nothing."""
        ...

    def set(self, key: str, value: str) -> None:
        """Put a text under a key, whatever was there."""
        ...

    def add(self, key: str, count: int) -> int:
        """Add to a counter, which starts at 0; return the sum. A counter is no key of `get`."""
        ...

    def swap(self, key: str, expected: str, value: str) -> bool:
        """Put a text under a key that holds ``expected`` (empty: holds nothing); tell whether this was done.

        The text must be one that no other call puts there: torch's store says only what a key holds in the end.
        """
        ...


def _connect(address: str, port: int, *, keep: bool = False) -> TCPStore:
    return TCPStore(address, port, is_master=keep, timeout=_TIMEOUT, wait_for_workers=False)


class SharedStore:
    """`KeyValue` in torch's TCPStore.

    ``prefix`` keeps apart those that share a store one after the other: see `join_round`. Raises RuntimeError, as torch
    does, once the process that keeps the store is gone.
    """

    def __init__(self, store: TCPStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    @classmethod
    def connect(cls, rank: int, size: int) -> SharedStore:
        """Connect to the store that the environment names, which rank 0 keeps unless torchrun does, and join a round.

        TimeoutError when rank 0 does not come.
        """
        kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = _connect(address, port, keep=rank == 0 and not kept_by_agent)
        return cls(store, f"dspark/{open_round(_connect(address, port), size) if rank == 0 else join_round(store)}")

    def again(self) -> SharedStore:
        """Return a second connection to the same keys, for a thread that must not wait for the first one's calls."""
        return SharedStore(_connect(self._store.host, self._store.port), self._prefix)

    @property
    def torch_store(self) -> Store:
        """The store as `torch.distributed.init_process_group` takes it, in a part of its own."""
        return PrefixStore(f"{self._prefix}/group", self._store)

    def get(self, key: str) -> str | None:
        """See `KeyValue`."""
        path = f"{self._prefix}/{key}"
        return self._store.get(path).decode() if self._store.check([path]) else None

    def set(self, key: str, value: str) -> None:
        """See `KeyValue`."""
        self._store.set(f"{self._prefix}/{key}", value)

    def add(self, key: str, count: int) -> int:
        """See `KeyValue`."""
        return int(self._store.add(f"{self._prefix}/{key}", count))

    def swap(self, key: str, expected: str, value: str) -> bool:
        """See `KeyValue`."""
        path = f"{self._prefix}/{key}"
        return bool(self._store.compare_set(path, expected, value) == value.encode())


class LocalKeys:
    """`KeyValue` of a process that is alone."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counters: dict[str, int] = {}

    def get(self, key: str) -> str | None:
        """See `KeyValue`."""
        return self._values.get(key)

    def set(self, key: str, value: str) -> None:
        """See `KeyValue`."""
        self._values[key] = value

    def add(self, key: str, count: int) -> int:
        """See `KeyValue`."""
        self._counters[key] = self._counters.get(key, 0) + count
        return self._counters[key]

    def swap(self, key: str, expected: str, value: str) -> bool:
        """See `KeyValue`."""
        if self._values.get(key, "") != expected:
            return False
        self._values[key] = value
        return True


class ScopedKeys:
    """A part of another `KeyValue`, so that two runs of one job do not read each other's keys."""

    def __init__(self, keys: KeyValue, scope: str) -> None:
        self._keys = keys
        self._scope = scope

    def get(self, key: str) -> str | None:
        """See `KeyValue`."""
        return self._keys.get(f"{self._scope}/{key}")

    def set(self, key: str, value: str) -> None:
        """See `KeyValue`."""
        self._keys.set(f"{self._scope}/{key}", value)

    def add(self, key: str, count: int) -> int:
        """See `KeyValue`."""
        return self._keys.add(f"{self._scope}/{key}", count)

    def swap(self, key: str, expected: str, value: str) -> bool:
        """See `KeyValue`."""
        return self._keys.swap(f"{self._scope}/{key}", expected, value)
