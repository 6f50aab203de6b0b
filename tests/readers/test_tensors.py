"""Batch memory is used again, and never while somebody looks at it."""

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.readers.tensors import BlockPool

KIB = 1024
BLOCK = 64 * KIB


def lease_and_drop(pool: BlockPool, count: int) -> None:
    """Have ``count`` blocks out at once, and give them all back."""
    kept = [pool.lease(BLOCK) for _ in range(count)]
    kept.clear()


def test_a_block_returns_when_its_tensor_goes() -> None:
    pool = BlockPool(4 * BLOCK)
    lease = pool.lease(BLOCK)
    place = lease.data_ptr()
    del lease
    assert pool.lease(BLOCK).data_ptr() == place


def test_a_view_keeps_its_block() -> None:
    pool = BlockPool(4 * BLOCK)
    view = pool.lease(BLOCK)[128:256].view(torch.float32).view(4, 8)
    view.fill_(7)
    pool.lease(BLOCK).fill_(255)
    assert (view == 7).all()


def test_the_last_view_gives_its_block_back() -> None:
    pool = BlockPool(4 * BLOCK)
    lease = pool.lease(BLOCK)
    place, views = lease.data_ptr(), [lease[:8], lease[8:].view(torch.int64)]
    del lease
    other = pool.lease(BLOCK)
    assert other.data_ptr() != place
    views.clear()
    assert pool.lease(BLOCK).data_ptr() == place


def test_kept_blocks_are_all_different() -> None:
    pool = BlockPool(2 * BLOCK)
    kept = [pool.lease(BLOCK).fill_(number) for number in range(9)]
    assert [int(block.unique()) for block in kept] == list(range(9))


def test_a_numpy_view_keeps_its_block_too() -> None:
    pool = BlockPool(4 * BLOCK)
    array = pool.lease(BLOCK).numpy()
    array[:] = 3
    pool.lease(BLOCK).fill_(0)
    assert (array == 3).all()


def test_a_block_may_return_from_another_thread() -> None:
    pool = BlockPool(4 * BLOCK)
    held = [pool.lease(BLOCK)]
    place = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.lease(BLOCK).data_ptr() == place


def test_a_block_in_a_cycle_returns_with_the_collector() -> None:
    pool = BlockPool(4 * BLOCK)
    cycle: list[object] = [pool.lease(BLOCK)]
    place = cycle[0].data_ptr()  # type: ignore[attr-defined]  # a tensor
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.lease(BLOCK).data_ptr() == place


def test_free_blocks_over_the_limit_are_given_up() -> None:
    pool = BlockPool(3 * BLOCK)
    lease_and_drop(pool, 8)
    pool.lease(BLOCK)
    assert pool.nbytes == 3 * BLOCK


def test_another_size_takes_the_place_of_the_one_not_asked_for() -> None:
    pool = BlockPool(4 * BLOCK)
    lease_and_drop(pool, 4)
    large = pool.lease(3 * BLOCK)
    assert pool.nbytes == 4 * BLOCK
    del large


@given(st.lists(st.tuples(st.integers(1, 40 * KIB), st.integers(0, 5)), max_size=40))
def test_free_and_leased_blocks_stay_under_the_limit(steps) -> None:
    pool, kept, limit = BlockPool(100 * KIB), [], 100 * KIB
    for nbytes, keep in steps:
        kept.append(pool.lease(nbytes))
        assert pool.nbytes <= max(limit, sum(lease.numel() for lease in kept))
        kept = kept[len(kept) - keep :] if keep < len(kept) else kept


@given(st.integers(0, 2**40))
def test_a_block_is_hardly_larger_than_what_was_asked_for(nbytes) -> None:
    size = BlockPool.block_bytes(nbytes)
    assert nbytes <= size <= max(4096, nbytes * 9 // 8)
    assert BlockPool.block_bytes(size) == size


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 5_000_000])
def test_a_lease_has_at_least_the_bytes_asked_for(nbytes) -> None:
    lease = BlockPool(0).lease(nbytes)
    assert lease.dtype == torch.uint8
    assert lease.numel() >= nbytes
    assert lease.data_ptr() % 64 == 0


def test_a_closed_pool_leaves_what_is_leased_alone() -> None:
    pool = BlockPool(4 * BLOCK)
    lease = pool.lease(BLOCK).fill_(9)
    pool.close()
    assert (lease == 9).all()
