import logging

import numpy as np
import pytest

from dspark_store.sources.megatron.builder import PairBuilder
from dspark_store.sources.parts import build_blend
from dspark_store.sources.registry import SourceContext, SpecValue
from dspark_store.sources.source import SourceError
from tests.sources.megatron.pairs import write_pair

CONTEXT = SourceContext(seq_length=4, vocab_size=50)


def dummy(samples, seed, **options):
    return {"type": "dummy", "samples": samples, "seed": seed, **options}


def test_a_blend_is_built_from_what_users_write():
    blend = build_blend(CONTEXT, sources=[0.3, dummy(4, 1), 0.7, dummy(8, 2)], schedule="megatron", samples=10)
    assert [sample.origin for sample in blend.read()] == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]


def test_parts_are_named_by_option_or_type_and_never_alike():
    unnamed: list[SpecValue] = [{"source": dummy(2, 1)}, {"source": dummy(2, 2)}]
    third = dummy(2, 3)
    blend = build_blend(CONTEXT, sources=[*unnamed, {"source": third, "name": "third"}])
    assert blend.origins() == ("dummy", "dummy 2", "third")
    blend = build_blend(CONTEXT, sources=[*unnamed, {"source": third, "name": "dummy"}])
    assert blend.origins() == ("dummy 2", "dummy 3", "dummy")


def test_two_parts_of_one_given_name_are_refused():
    with pytest.raises(SourceError, match="named 'a'"):
        build_blend(CONTEXT, sources=[{"source": dummy(2, n), "name": "a"} for n in range(2)])


def test_a_part_of_weight_0_is_left_out_unopened_with_a_warning(caplog):
    sources = [1, dummy(3, 1), 0, {"type": "no such type"}, 2, dummy(3, 2)]
    with caplog.at_level(logging.WARNING):
        blend = build_blend(CONTEXT, sources=sources)
    assert blend.origins() == ("dummy", "dummy 2")
    assert "'no such type' of the blend has weight 0" in caplog.text


def test_repeated_records_are_told(caplog):
    with caplog.at_level(logging.INFO):
        build_blend(CONTEXT, sources=[1, dummy(2, 1), 1, dummy(9, 2)], schedule="hyper_parallel", samples=10)
    assert "part 'dummy' has 2 records: 5 taken, 3 of them again" in caplog.text


@pytest.mark.parametrize(("schedule", "sizes"), [("megatron", [4, 8]), ("hyper_parallel", [10, 10])])
def test_a_part_that_can_have_any_number_of_records_has_what_the_schedules_project_builds(schedule, sizes):
    sources: SpecValue = [3, {"type": "dummy", "seed": 1}, 7, {"type": "dummy", "seed": 2}]
    blend = build_blend(CONTEXT, sources=sources, schedule=schedule, samples=10)
    assert [item.records for item in blend.shares()] == sizes


def test_the_limit_of_samples_is_that_of_the_whole():
    context = SourceContext(seq_length=4, max_samples=4, split="train[:50%]")
    blend = build_blend(context, sources=[dummy(12, 1), dummy(12, 2)])
    assert [(item.records, item.taken) for item in blend.shares()] == [(6, 2), (6, 2)]


def test_an_error_of_a_part_is_that_of_the_blend():
    with pytest.raises(SourceError, match="vocab of a dummy source"):
        build_blend(CONTEXT, sources=[dummy(3, 1, vocab=0), dummy(3, 2)])


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
        CONTEXT, sources=[1, pairs[0], 1, pairs[1]], schedule="megatron", samples=4 * len(sizes), on_short="wrap"
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
