"""The loader gives every sample its turn, over any number of ranks, and goes on where it stopped."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_store import Cache, CacheLoader, open_cache
from dspark_store.format.schema import IDS
from dspark_store.readers.order import EndRule
from tests.processes import run_python
from tests.stores import Shape, build_store

LENGTHS = (20, 7, 13, 8, 3, 9, 16, 20, 17, 11, 5)
SIZES = (1, 2, 7, 29)
TINY = Shape(seq_length=3, shard_size=4, chunk_tokens=3, hidden_size=4, layer_ids=(0,))

end_rules: st.SearchStrategy[EndRule] = st.sampled_from(["drop", "short", "repeat"])
seeds = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return open_cache(build_store(tmp_path_factory.mktemp("store"), lengths=LENGTHS, weights=False).path)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Cache]:
    """Stores of several numbers of tiny samples, by their number."""
    place = tmp_path_factory.mktemp("many")
    return {
        count: open_cache(
            build_store(
                place / str(count), lengths=[1 + row % 3 for row in range(count)], shape=TINY, weights=False
            ).path
        )
        for count in SIZES
    }


def loader_of(cache: Cache, batch_size: int, rank: int = 0, ranks: int = 1, **options: Any) -> CacheLoader:
    """A loader of ids alone unless told otherwise, of all samples, on one of some simulated ranks."""
    options = {"columns": [IDS], "min_supervised": 0, **options}
    return CacheLoader(cache, batch_size, dp_rank=rank, dp_size=ranks, **options)


def stream(cache: Cache, batch_size: int, ranks: int, **options: Any) -> list[list[list[int]]]:
    """The samples of every batch of an epoch, by rank."""
    loaders = [loader_of(cache, batch_size, rank, ranks, **options) for rank in range(ranks)]
    return [batches_of(loader) for loader in loaders]


def batches_of(loader: CacheLoader, state: dict[str, int | str] | None = None) -> list[list[int]]:
    """The samples of every batch that is left of an epoch; none when even the first global batch is dropped."""
    if state is not None:
        loader.load_state_dict(state)
    return [batch["sample"].tolist() for batch in loader] if len(loader) else []


def global_batches(by_rank: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [[sample for batch in step for sample in batch] for step in zip(*by_rank, strict=True)]


@settings(max_examples=60)
@given(
    count=st.sampled_from(SIZES),
    batch_size=st.integers(1, 6),
    ranks=st.integers(1, 4),
    window=st.none() | st.integers(1, 3),
    last=end_rules,
    seed=seeds,
    fraction=st.sampled_from([0.0, 0.3]),
)
def test_an_epoch_covers_every_sample_once_over_all_ranks(
    many, count, batch_size, ranks, window, last, seed, fraction
) -> None:
    options = {"window_shards": window, "last": last, "seed": seed}
    if fraction:
        options |= {"split": "train", "validation_fraction": fraction}
    try:
        admitted = loader_of(many[count], 1, **options).samples.tolist()
    except ValueError:
        return  # the whole store is validation
    by_rank = stream(many[count], batch_size, ranks, **options)
    seen = Counter(itertools.chain.from_iterable(itertools.chain.from_iterable(by_rank)))
    size = batch_size * ranks
    assert len({len(batches) for batches in by_rank}) == 1
    if last == "drop":
        assert (seen.total(), len(seen)) == (len(admitted) // size * size,) * 2
        assert set(seen) <= set(admitted)
    else:
        assert sorted(seen) == admitted
        assert seen.total() == (len(admitted) if last == "short" else -(-len(admitted) // size) * size)
        assert max(seen.values()) - min(seen.values()) <= 1


@settings(max_examples=40)
@given(
    unit=st.integers(1, 2),
    one=st.integers(1, 3),
    other=st.integers(1, 3),
    last=end_rules,
    window=st.none() | st.integers(1, 3),
    seed=seeds,
    data=st.data(),
)
def test_a_resume_under_another_world_size_gives_the_same_stream(
    many, unit, one, other, last, window, seed, data
) -> None:
    options = {"last": last, "window_shards": window, "seed": seed}
    before = [loader_of(many[29], unit * one, rank, other, **options) for rank in range(other)]
    whole = global_batches(stream(many[29], unit * one, other, **options))
    stop = data.draw(st.integers(0, len(before[0])))
    taken = [[batch["sample"].tolist() for batch in itertools.islice(loader, stop)] for loader in before]
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states)
    after = [loader_of(many[29], unit * other, rank, one, **options) for rank in range(one)]
    rest = [batches_of(loader, states[0]) for loader in after]
    assert global_batches(taken) + global_batches(rest) == whole


@settings(max_examples=10)
@given(seed=seeds, stop=st.integers(0, 3))
def test_packed_rows_resume_under_another_world_size(cache, seed, stop) -> None:
    def rows(batches: list[dict[str, torch.Tensor]]) -> Counter[tuple[int, ...]]:
        return Counter(tuple(row.tolist()) for batch in batches for row in batch[IDS])

    options = {"shape": "packed", "budget": 24, "last": "short", "seed": seed}
    before = [loader_of(cache, 1, rank, 2, **options) for rank in range(2)]
    stop = min(stop, len(before[0]))
    taken = [list(itertools.islice(loader, stop)) for loader in before]
    after = loader_of(cache, 2, **options)
    after.load_state_dict(before[1].state_dict())
    assert rows(list(itertools.chain(*taken, after))) == rows(list(loader_of(cache, 2, **options)))


@settings(max_examples=20)
@given(seed=seeds, epoch=st.integers(0, 5), window=st.none() | st.integers(1, 3))
def test_two_loaders_with_one_seed_agree(many, seed, epoch, window) -> None:
    streams = []
    for cache in (many[29], Cache(many[29].storage, threads=1)):
        loader = loader_of(cache, 4, seed=seed, window_shards=window)
        loader.set_epoch(epoch)
        streams.append(batches_of(loader))
    assert streams[0] == streams[1]
    assert streams[0] != batches_of(loader_of(many[29], 4, seed=seed ^ 1, window_shards=window))


def test_a_rank_may_get_an_empty_short_batch(many) -> None:
    loader = CacheLoader(many[7], 3, last="short", shuffle=False, min_supervised=0, dp_rank=0, dp_size=2)
    *_, tail = loader
    assert [tuple(values.shape) for values in tail.values()] == [(0, 3), (0, 3), (0, 3, 4), (0, 3, 4), (0,), (0,)]


def test_without_shuffle_samples_ascend(cache) -> None:
    assert batches_of(loader_of(cache, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_epochs_follow_each_other_and_each_has_its_order(many) -> None:
    loader = loader_of(many[29], 29)
    streams = [batches_of(loader) for _ in range(3)]
    assert loader.epoch == 3
    assert len({tuple(batches[0]) for batches in streams}) == 3
    loader.set_epoch(1)
    assert batches_of(loader) == streams[1]


def test_an_epoch_set_during_an_iteration_holds_for_the_next(many) -> None:
    loader, expected = loader_of(many[29], 5), batches_of(loader_of(many[29], 5))
    seen = []
    for batch in loader:
        seen.append(batch["sample"].tolist())
        loader.set_epoch(4)
    assert seen == expected
    assert (loader.epoch, loader.state_dict()["consumed"]) == (4, 0)


def test_a_state_loaded_before_the_first_batch_holds(many) -> None:
    loader, other = loader_of(many[29], 5), loader_of(many[29], 5)
    iteration = iter(loader)
    next(iter(other))
    loader.load_state_dict(other.state_dict())
    assert [batch["sample"].tolist() for batch in iteration] == batches_of(loader_of(many[29], 5))[1:]


def test_a_loaded_state_ends_the_iteration_under_way(many) -> None:
    loader = loader_of(many[29], 5)
    state, iteration = loader.state_dict(), iter(loader)
    next(iteration)
    loader.load_state_dict(state)
    assert list(iteration) == []
    assert loader.state_dict() == state
    assert batches_of(loader) == batches_of(loader_of(many[29], 5))


def test_the_state_says_what_was_taken_not_what_was_read_ahead(many) -> None:
    loader = loader_of(many[29], 4)
    for steps, _ in enumerate(loader, 1):
        state = loader.state_dict()
        assert state.pop("stream")
        assert state == {"epoch": 0, "consumed": 4 * steps, "count": 29, "global_batch": 4, "seed": 0}
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)


def test_after_closing_the_epoch_begins_anew(many) -> None:
    loader, expected = loader_of(many[29], 5), batches_of(loader_of(many[29], 5))
    iteration = iter(loader)
    next(iteration)
    loader.close()
    assert list(iteration) == []
    assert batches_of(loader) == expected


def test_an_iteration_that_was_left_begins_anew_and_a_loaded_state_goes_on(many) -> None:
    loader, expected = loader_of(many[29], 5), batches_of(loader_of(many[29], 5))
    for _ in range(2):
        assert next(iter(loader))["sample"].tolist() == expected[0]
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert batches_of(loader) == expected[1:]


@pytest.mark.parametrize("other", [{"window_shards": 2}, {"shuffle": False}, {"last": "short"}])
def test_a_state_of_another_stream_is_refused(many, other) -> None:
    state = loader_of(many[29], 1).state_dict()
    with pytest.raises(ValueError, match="another stream"):
        loader_of(many[29], 1, **other).load_state_dict(state)


def test_repeats_are_logged(many, caplog) -> None:
    caplog.set_level("INFO", "dspark_store")
    loader_of(many[29], 3, 1, 4, last="repeat")
    assert "an epoch repeats 7 samples to fill its last batch on every rank" in caplog.text


def test_an_epoch_smaller_than_a_batch_says_so(many) -> None:
    with pytest.raises(ValueError, match="the epoch has no batch: 7 items are fewer than the 8 of one global batch"):
        list(loader_of(many[7], 4, 0, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_bytes": 0}, "prefetch_bytes must be >= 1, got 0"),
        ({"shape": "ragged"}, "the shape is 'ragged'; choose from full, longest, packed"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"seed": -1}, "seed must be between 0 and 2^64 - 1, got -1"),
        ({"shape": "packed", "budget": 0}, "budget must be >= 1, got 0"),
        ({"shape": "packed", "budget": 8, "long_samples": "keep"}, "is 'keep'; choose from cut, leave_out"),
        ({"shape": "packed"}, "a budget belongs to packed rows"),
        ({"budget": 64}, "a budget belongs to packed rows"),
        ({"shape": "packed", "budget": 64, "positions": slice(4)}, "packed rows are read whole"),
        ({"layout": "wide"}, "the layout is 'wide'; choose from flat, stacked"),
        ({"columns": ["labels"]}, "column 'labels' is unknown"),
        ({"layers": [3]}, "layer 3 was not captured"),
        ({"last": "pad"}, "choose from drop, short, even, repeat"),
        ({"window_shards": 0}, "shards of a shard window must be >= 1"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2 is outside the 2 ranks"),
        ({"split": "test"}, "the side of a split is 'test'; choose from train, validation"),
        ({"validation_fraction": 0.1}, "needs split='train' or split='validation'"),
        ({"split": "train"}, "split='train' needs a validation_fraction above 0"),
        ({"device": "meta"}, "copied to a CUDA device or stay on the CPU, got device 'meta'"),
    ],
)
def test_options_that_make_no_sense_are_refused(cache, options, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CacheLoader(cache, **{"batch_size": 4, "dp_rank": 0, "dp_size": 1, **options})


def test_a_state_that_would_give_another_stream_is_refused(many) -> None:
    state = loader_of(many[29], 4, seed=3).state_dict()
    for loader, message in (
        (loader_of(many[29], 4), "saved with seed 3, this loader has 0"),
        (loader_of(many[29], 4, 0, 2, seed=3), "global batch of 4, this loader has 8"),
        (loader_of(many[7], 4, seed=3), "epoch of 29 items, this loader's has 7"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)
        assert (loader.epoch, loader.state_dict()["consumed"]) == (0, 0)
    for wrong, message in (({**state, "consumed": 32}, "another end rule"), ({}, "it lacks consumed")):
        with pytest.raises(ValueError, match=message):
            loader_of(many[29], 4, seed=3).load_state_dict(wrong)


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit", "import builtins; builtins.kept = batches", "loader.close()", "cache.close()"]
)
def test_a_script_may_end_in_the_midst_of_an_epoch(ending, tmp_path):
    store = build_store(tmp_path, lengths=LENGTHS, weights=False).path
    script = f"""
import dspark_store
cache = dspark_store.open_cache({str(store)!r})
loader = dspark_store.CacheLoader(cache, 2)
batches = iter(loader)
batch = next(batches)
{ending}
"""
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stderr) == (0, "")
