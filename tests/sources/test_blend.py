import logging
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.sources.blend import Blend, BlendPart
from dspark_store.sources.megatron.builder import PairBuilder
from dspark_store.sources.parts import build_blend
from dspark_store.sources.registry import SourceContext, SpecValue
from dspark_store.sources.source import Sample, SourceError
from tests.sources.megatron.pairs import write_pair

SHIFT = 5


@dataclass(frozen=True)
class Pieces:
    """A source whose record `r` gives `counts[r]` samples of the ids [r, piece], with one of the cursors in use."""

    counts: tuple[int, ...]
    cursors: str = "record"
    names: tuple[str, ...] = ("",)
    known: bool = True

    def identity(self):
        return {"type": "pieces", "counts": list(self.counts)}

    def __len__(self):
        return len(self.counts)

    def origins(self):
        return self.names

    def lengths(self):
        return np.arange(len(self.counts)) * 10 if self.known else None

    def _cursor(self, record, piece):
        ends = piece == self.counts[record]
        if self.cursors == "shifted":
            return (record + 1) << SHIFT if ends else (record << SHIFT) + piece
        if self.cursors == "counted":
            return sum(self.counts[:record]) + piece
        return record + 1

    def read(self, cursor=0):
        for record, count in enumerate(self.counts):
            for piece in range(1, count + 1):
                if self._cursor(record, piece) > cursor:
                    ids = np.array([record, piece], np.int32)
                    origin = record % len(self.names)
                    yield Sample(ids, np.ones(2, np.uint8), self._cursor(record, piece), origin)

    def record_of(self, cursor):
        if self.cursors == "shifted":
            return min(cursor >> SHIFT, len(self))
        if self.cursors == "counted":
            return bisect_right(list(accumulate(self.counts)), cursor)
        return min(cursor, len(self))

    def sample(self, record):
        return next(sample for sample in self.read() if sample.input_ids[0] == record)


def part(name, records, weight=None, **options):
    return BlendPart(name, Pieces((1,) * records, **options), weight)


def taken(samples):
    return [(sample.origin, *sample.input_ids.tolist()) for sample in samples]


def records(blend):
    return [(sample.origin, int(sample.input_ids[0])) for sample in blend.read()]


def test_an_exhaustive_blend_reads_megatrons_worked_example():
    blend = Blend([part("a", 3), part("b", 1), part("c", 2)])
    assert records(blend) == [(0, 0), (2, 0), (1, 0), (0, 1), (2, 1), (0, 2)]
    assert blend.origins() == ("a", "b", "c")


def test_a_weighted_blend_reads_megatrons_worked_example():
    blend = Blend([part("a", 4, 3), part("b", 8, 7)], schedule="megatron", samples=10)
    assert "".join(str(origin) for origin, _ in records(blend)) == "1011011011"
    assert "".join(str(record) for _, record in records(blend)) == "0012134256"


def test_hyper_parallels_blend_wraps():
    blend = Blend([part("a", 2, 0.5), part("b", 100, 0.5)], schedule="hyper_parallel", samples=8)
    assert [record for origin, record in records(blend) if origin == 0] == [0, 1, 0, 1]
    assert [(item.taken, item.repeated, item.left_out) for item in blend.shares()] == [(4, 2, 0), (4, 0, 96)]


def test_megatrons_blend_refuses_a_part_that_is_too_short():
    with pytest.raises(SourceError, match="after 4: 'a' has 2; take fewer samples"):
        Blend([part("a", 2, 1), part("b", 100, 1)], schedule="megatron", samples=8)


@pytest.mark.parametrize("schedule", ["megatron", "hyper_parallel"])
def test_a_weighted_blend_without_a_number_ends_where_a_part_does(schedule):
    blend = Blend([part("a", 2, 1), part("b", 100, 1)], schedule=schedule)
    assert Counter(origin for origin, _ in records(blend)) == {0: 2, 1: 2}
    assert [item.repeated for item in blend.shares()] == [0, 0]


def test_weights_of_an_exhaustive_blend_order_what_is_read_once():
    blend = Blend([part("a", 2, 30), part("b", 8, 70)])
    assert "".join(str(origin) for origin, _ in records(blend)) == "1011011111"
    assert sorted(records(blend)) == [(0, n) for n in range(2)] + [(1, n) for n in range(8)]


def test_half_of_an_exhaustive_blend_has_the_mixture():
    half = Counter(
        origin for origin, _ in records(Blend([part("a", 100), part("b", 60), part("c", 40)], max_samples=100))
    )
    assert half == {0: 50, 1: 30, 2: 20}


counts = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple).filter(sum)


@st.composite
def parts_of_blends(draw):
    cursors = draw(st.sampled_from(["record", "shifted", "counted"]))
    given_counts = draw(counts)
    if cursors == "record":
        given_counts = tuple(min(count, 1) for count in given_counts)
    return BlendPart("", Pieces(given_counts, cursors), draw(st.floats(0.1, 1)))


several = st.lists(parts_of_blends(), min_size=1, max_size=3).map(
    lambda parts: [replace(part, name=str(number)) for number, part in enumerate(parts)]
)


@given(several, st.none() | st.integers(1, 25))
def test_reading_goes_on_exactly_after_any_sample(parts, samples):
    blend = Blend(parts) if samples is None else Blend(parts, schedule="hyper_parallel", samples=samples)
    whole = list(blend.read())
    cursors = [sample.cursor for sample in whole]
    assert cursors == sorted(set(cursors))
    assert all(blend.record_of(cursor) <= len(blend) for cursor in cursors)
    for number, cursor in enumerate(cursors, start=1):
        assert taken(blend.read(cursor)) == taken(whole[number:])


@given(several)
def test_an_exhaustive_blend_reads_every_sample_once(parts):
    every = [(number, *ids) for number, item in enumerate(parts) for _, *ids in taken(item.source.read())]
    assert sorted(taken(Blend(parts).read())) == every


def test_the_samples_of_a_record_stay_together():
    blend = Blend([BlendPart("a", Pieces((2, 3), "shifted")), part("b", 2)])
    assert taken(blend.read()) == [(0, 0, 1), (0, 0, 2), (1, 0, 1), (0, 1, 1), (0, 1, 2), (0, 1, 3), (1, 1, 1)]
    assert [blend.record_of(sample.cursor) for sample in blend.read()] == [0, 1, 2, 2, 2, 3, 4]


def test_records_are_found_at_random():
    blend = Blend([part("a", 3, 1), part("b", 5, 1)], schedule="hyper_parallel", samples=12)
    assert [taken([blend.sample(number)])[0] for number in range(12)] == taken(blend.read())
    assert blend.sample(3).cursor == list(blend.read())[3].cursor
    with pytest.raises(IndexError, match="record 12"):
        blend.sample(12)


def test_lengths_are_known_where_every_part_knows_its_own():
    blend = Blend([part("a", 3), part("b", 2)])
    lengths = blend.lengths()
    assert lengths is not None
    assert lengths.tolist() == [record * 10 for _, record in records(blend)]
    assert Blend([part("a", 3), part("b", 2, known=False)]).lengths() is None


def test_parts_of_parts_keep_their_names():
    inner = Blend([part("x", 2), part("y", 2)])
    blend = Blend([part("a", 2), BlendPart("b", inner), part("c", 1, names=("left", "right"))])
    assert blend.origins() == ("a", "b/x", "b/y", "c/left", "c/right")
    assert {origin for origin, _ in records(blend)} == {0, 1, 2, 3}


def test_identity_is_of_content_and_not_of_names():
    assert Blend([part("a", 3), part("b", 2)]).identity() == Blend([part("x", 3), part("y", 2)]).identity()
    assert (
        Blend([part("a", 3, 3), part("b", 2, 7)]).identity() == Blend([part("a", 3, 30), part("b", 2, 70)]).identity()
    )
    different = [
        Blend([part("a", 3), part("b", 2)]),
        Blend([part("a", 2), part("b", 3)]),
        Blend([part("a", 3), part("b", 2)], max_samples=4),
        Blend([part("a", 3, 1), part("b", 2, 1)]),
        Blend([part("a", 3, 1), part("b", 2, 1)], schedule="megatron"),
        Blend([part("a", 3, 1), part("b", 2, 1)], schedule="hyper_parallel", samples=4, on_short="wrap"),
        Blend([part("a", 3, 1), part("b", 2, 1)], schedule="hyper_parallel", samples=4, on_short="stop"),
    ]
    assert len({str(blend.identity()) for blend in different}) == len(different)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ([], {}, "no sources"),
        ([part("a", 3), part("b", 0), part("c", 0)], {}, "'b', 'c' of a blend: no records"),
        ([part("a", 3, 1), part("b", 0, 1)], {}, "'b' of a blend: no records"),
        ([part("a", 3, 1), part("b", 3, 0)], {}, "'b' of a blend has weight 0"),
        ([part("a", 3, 1), part("b", 3, -1)], {}, "weight of part 1 .* -1"),
        ([part("a", 3, float("nan")), part("b", 3, 1)], {}, "weight of part 0 .* nan"),
        ([part("a", 3, 1), part("b", 3)], {}, "part 1 of a blend has no weight"),
        ([part("a", 3), part("a", 2)], {}, "two parts of a blend are named 'a'"),
        ([part("a/b", 3), part("a", 2, names=("b", "c"))], {}, "two parts of a blend are named 'a/b'"),
        ([part("a", 3)], {"schedule": "megatron"}, "goes by weight"),
        ([part("a", 3)], {"schedule": "megatorn"}, "'megatorn' of a blend is unknown; the nearest is 'megatron'"),
        ([part("a", 3)], {"samples": 3}, "takes every record once and has no samples"),
        ([part("a", 3)], {"on_short": "stop"}, "takes every record once and has no on_short"),
        ([part("a", 3, 1)], {"schedule": "megatron", "on_short": "rap"}, "the nearest is 'wrap'"),
        ([part("a", 3, 1)], {"schedule": "megatron", "on_short": "wrap"}, "never ends"),
        ([part("a", 3, 1)], {"schedule": "megatron", "samples": 0}, "samples of a blend is 0"),
        ([part("a", 3)], {"max_samples": True}, "max_samples of a blend is True"),
    ],
)
def test_a_blend_that_cannot_be_is_refused(parts, options, message):
    with pytest.raises(SourceError, match=message):
        Blend(parts, **options)


@pytest.mark.parametrize("cursor", [-1, (5 << 20) + 1, 6 << 20])
def test_a_cursor_outside_the_blend_is_refused(cursor):
    with pytest.raises(ValueError, match="cursor is"):
        Blend([part("a", 3), part("b", 2)]).read(cursor)


# As users write it

JOB = SourceContext(seq_length=4, vocab_size=50)


def dummy(samples, seed, **options):
    return {"type": "dummy", "samples": samples, "seed": seed, **options}


def test_a_blend_is_built_from_what_users_write():
    blend = build_blend(JOB, sources=[0.3, dummy(4, 1), 0.7, dummy(8, 2)], schedule="megatron", samples=10)
    assert [sample.origin for sample in blend.read()] == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]


def test_parts_are_named_by_option_or_type_and_never_alike():
    unnamed: list[SpecValue] = [{"source": dummy(2, 1)}, {"source": dummy(2, 2)}]
    third = dummy(2, 3)
    blend = build_blend(JOB, sources=[*unnamed, {"source": third, "name": "third"}])
    assert blend.origins() == ("dummy", "dummy 2", "third")
    blend = build_blend(JOB, sources=[*unnamed, {"source": third, "name": "dummy"}])
    assert blend.origins() == ("dummy 2", "dummy 3", "dummy")


def test_two_parts_of_one_given_name_are_refused():
    with pytest.raises(SourceError, match="named 'a'"):
        build_blend(JOB, sources=[{"source": dummy(2, n), "name": "a"} for n in range(2)])


def test_a_part_of_weight_0_is_left_out_unopened_with_a_warning(caplog):
    sources = [1, dummy(3, 1), 0, {"type": "no such type"}, 2, dummy(3, 2)]
    with caplog.at_level(logging.WARNING):
        blend = build_blend(JOB, sources=sources)
    assert blend.origins() == ("dummy", "dummy 2")
    assert "'no such type' of the blend has weight 0" in caplog.text


def test_repeated_records_are_told(caplog):
    with caplog.at_level(logging.INFO):
        build_blend(JOB, sources=[1, dummy(2, 1), 1, dummy(9, 2)], schedule="hyper_parallel", samples=10)
    assert "part 'dummy' has 2 records: 5 taken, 3 of them again" in caplog.text


@pytest.mark.parametrize(("schedule", "sizes"), [("megatron", [4, 8]), ("hyper_parallel", [10, 10])])
def test_a_part_that_can_have_any_number_of_records_has_what_the_schedules_project_builds(schedule, sizes):
    sources: SpecValue = [3, {"type": "dummy", "seed": 1}, 7, {"type": "dummy", "seed": 2}]
    blend = build_blend(JOB, sources=sources, schedule=schedule, samples=10)
    assert [item.records for item in blend.shares()] == sizes


def test_the_limit_of_samples_is_that_of_the_whole():
    context = SourceContext(seq_length=4, max_samples=4, split="train[:50%]")
    blend = build_blend(context, sources=[dummy(12, 1), dummy(12, 2)])
    assert [(item.records, item.taken) for item in blend.shares()] == [(6, 2), (6, 2)]


def test_an_error_of_a_part_is_that_of_the_blend():
    with pytest.raises(SourceError, match="vocab of a dummy source"):
        build_blend(JOB, sources=[dummy(3, 1, vocab=0), dummy(3, 2)])


def test_a_megatron_blend_of_windows_is_megatrons_own(tmp_path):
    """The numbers are of Megatron-LM's builder, run: sizes and seed, weights 3 and 7, 10 samples of 4 tokens."""
    for name, sizes in (("a", (5, 3, 8, 4)), ("b", (6, 6, 6))):
        with PairBuilder(tmp_path / name) as builder:
            for number, size in enumerate(sizes):
                builder.add_document(np.arange(size) + 100 * number)
    window: dict[str, SpecValue] = {"type": "megatron", "mode": "window", "seed": 42, "carry_next_token": False}
    sources: SpecValue = [3, {**window, "path": tmp_path / "a"}, 7, {**window, "path": tmp_path / "b"}]
    blend = build_blend(SourceContext(seq_length=4), sources=sources, schedule="megatron", samples=10)
    assert blend.origins() == ("a", "b")
    assert [item.records for item in blend.shares()] == [4, 8]
    assert "".join(str(sample.origin) for sample in blend.read()) == "1011011011"
    first = next(sample for sample in blend.read() if sample.origin == 0)
    assert first.input_ids.tolist() == [301, 302, 303, 0]


@pytest.mark.parametrize("sizes", [[0, 3, 2], [0, 0, 3, 0, 6, 0], [5, 0, 0, 3]])
@pytest.mark.parametrize("over_long", ["truncate", "drop", "split"])
def test_a_pair_with_empty_documents_takes_each_turn_with_the_document_of_that_turn(sizes, over_long, tmp_path):
    write_pair(tmp_path / "a", [[7] * size for size in sizes])
    write_pair(tmp_path / "b", [[8]] * (len(sizes) + 1))
    pairs: list[SpecValue] = [
        {"type": "megatron", "path": str(tmp_path / name), "over_long": over_long, "shuffle_seed": None}
        for name in "ab"
    ]
    blend = build_blend(
        JOB, sources=[1, pairs[0], 1, pairs[1]], schedule="megatron", samples=4 * len(sizes), on_short="wrap"
    )
    samples = list(blend.read())
    firsts = {blend.record_of(sample.cursor - 1): sample for sample in reversed(samples)}
    for turn in range(len(blend)):
        if turn in firsts:
            assert blend.sample(turn).input_ids.tolist() == firsts[turn].input_ids.tolist()
        else:
            with pytest.raises(SourceError, match="gives no sample"):
                blend.sample(turn)
    for place, sample in enumerate(samples):
        assert [later.cursor for later in blend.read(sample.cursor)] == [later.cursor for later in samples[place + 1 :]]
