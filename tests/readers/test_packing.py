"""Packed rows: what the planner promises for any lengths, its waste on real chats, and the fields of a row."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_store.readers.order import epoch_order
from dspark_store.readers.packing import PackedFields, PackPlan, pack, packed_fields, stack_fields

# Tokens of 400 chats between real prompts and a small model, as its tokenizer and template give them.
# fmt: off
CHATS = np.array([
    190, 184, 174, 193, 192, 217, 197, 219, 216, 120, 243, 189, 241, 242, 256, 298, 366, 284, 314, 309, 240, 422, 320,
    314, 265, 414, 243, 253, 463, 270, 520, 334, 302, 232, 100, 303, 267, 204, 346, 358, 293, 248, 321, 288, 358, 270,
    407, 420, 65, 142, 150, 163, 137, 143, 144, 177, 152, 156, 162, 182, 195, 208, 269, 249, 111, 102, 103, 125, 122,
    132, 129, 119, 175, 174, 166, 195, 182, 307, 358, 249, 111, 121, 109, 106, 116, 133, 136, 138, 142, 155, 186, 208,
    171, 423, 226, 430, 157, 150, 151, 173, 159, 182, 189, 190, 206, 200, 199, 208, 183, 234, 221, 275, 172, 178, 180,
    187, 171, 176, 200, 198, 194, 206, 213, 200, 214, 234, 242, 280, 122, 117, 113, 135, 128, 148, 154, 171, 157, 160,
    164, 200, 277, 219, 260, 302, 271, 234, 167, 151, 273, 331, 342, 321, 331, 339, 342, 392, 431, 412, 328, 323, 93,
    93, 137, 129, 164, 186, 139, 145, 197, 165, 170, 182, 186, 190, 230, 253, 128, 109, 146, 150, 155, 210, 149, 156,
    212, 173, 155, 181, 188, 271, 283, 452, 239, 214, 312, 162, 244, 320, 240, 222, 357, 360, 374, 354, 339, 349, 301,
    277, 64, 374, 390, 425, 405, 408, 255, 366, 325, 288, 430, 453, 423, 471, 509, 380, 299, 259, 424, 334, 233, 425,
    419, 247, 420, 353, 351, 235, 450, 239, 282, 697, 62, 221, 209, 237, 237, 268, 249, 266, 261, 281, 202, 391, 304,
    310, 282, 329, 131, 289, 348, 365, 344, 278, 288, 268, 307, 364, 252, 284, 418, 429, 269, 513, 310, 149, 335, 330,
    346, 316, 201, 256, 358, 288, 371, 232, 388, 388, 411, 326, 380, 416, 245, 203, 410, 423, 171, 205, 347, 258, 262,
    461, 412, 429, 276, 510, 168, 176, 100, 161, 179, 167, 185, 199, 197, 287, 260, 217, 236, 305, 271, 547, 322, 308,
    342, 328, 298, 361, 280, 393, 279, 383, 283, 376, 348, 452, 434, 346, 102, 104, 112, 129, 139, 147, 149, 153, 159,
    164, 171, 198, 203, 231, 255, 268, 233, 133, 232, 258, 260, 240, 259, 286, 256, 273, 294, 254, 282, 299, 340, 446,
    166, 171, 173, 196, 184, 179, 196, 209, 215, 213, 230, 237, 319, 266, 419, 463, 124, 206, 233, 279, 254, 270, 208,
    275, 280, 280, 274, 341, 328, 332, 345, 448,
])
# fmt: on

length_lists = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)
row_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=8).map(np.array)


def packed(lengths, *, budget: int = 24, policy="cut", rows_per_batch: int = 2, dp_size: int = 1, **more) -> PackPlan:
    order = epoch_order(len(lengths), seed=0, epoch=0)
    sizes = np.asarray(lengths, np.int32)
    return pack(order, sizes, budget=budget, rows_per_batch=rows_per_batch, dp_size=dp_size, policy=policy, **more)


def pad_fraction(plan: PackPlan) -> float:
    return 1 - int(plan.lengths.sum()) / (len(plan) * plan.budget)


def test_rows_are_these() -> None:
    plan = pack(np.arange(8), np.array([5, 9, 1, 4, 0, 3, 7, 2]), budget=8, rows_per_batch=1, dp_size=1, policy="cut")
    rows = [plan.row(row) for row in range(len(plan))]
    assert [samples.tolist() for samples, _ in rows] == [[0, 5], [1], [3, 7], [2, 6]]
    assert [lengths.tolist() for _, lengths in rows] == [[5, 3], [8], [4, 2], [1, 7]]
    assert (plan.cut, plan.left_out, plan.empty) == (1, 0, 1)


@given(length_lists, st.integers(1, 50), st.integers(1, 70))
def test_every_sample_is_in_one_row_or_counted(lengths, budget, window) -> None:
    plan = packed(lengths, budget=budget, window=window)
    wanted = {sample: min(length, budget) for sample, length in enumerate(lengths) if length}
    assert dict(zip(plan.samples.tolist(), plan.lengths.tolist(), strict=True)) == wanted
    assert len(plan.samples) == len(wanted)
    assert plan.cut == sum(length > budget for length in lengths)
    assert plan.empty == lengths.count(0)


@given(length_lists, st.integers(1, 50))
def test_samples_over_the_budget_are_left_out_when_asked(lengths, budget) -> None:
    fitting = {sample for sample, length in enumerate(lengths) if 0 < length <= budget}
    if not fitting:
        with pytest.raises(ValueError, match="nothing to pack"):
            packed(lengths, budget=budget, policy="leave_out")
        return
    plan = packed(lengths, budget=budget, policy="leave_out")
    assert set(plan.samples.tolist()) == fitting
    assert (plan.cut, plan.left_out) == (0, sum(length > budget for length in lengths))


@given(length_lists, st.integers(1, 50), st.integers(1, 70))
def test_no_row_is_empty_or_over_the_budget(lengths, budget, window) -> None:
    plan = packed(lengths, budget=budget, window=window)
    assert plan.row_tokens.min() > 0
    assert plan.row_tokens.max() <= budget
    assert plan.row_tokens.tolist() == [plan.row(row)[1].sum() for row in range(len(plan))]


@given(length_lists, st.integers(1, 20))
def test_a_row_stays_near_the_shuffled_order(lengths, window) -> None:
    plan = packed(lengths, window=window)
    kept = [sample for sample in epoch_order(len(lengths), seed=0, epoch=0).tolist() if lengths[sample]]
    for row in range(len(plan)):
        places = [kept.index(sample) for sample in plan.row(row)[0]]
        assert places == sorted(places)
        assert places[-1] // window - places[0] // window <= 1


@given(length_lists, st.integers(1, 3), st.integers(1, 5))
def test_ranks_share_all_rows_in_as_many_batches(lengths, rows_per_batch, dp_size) -> None:
    plan = packed(lengths, rows_per_batch=rows_per_batch, dp_size=dp_size)
    rows = [[plan.rows_of(step, rank).tolist() for rank in range(dp_size)] for step in range(plan.batches.steps)]
    assert sorted(row for batch in rows for rank in batch for row in rank) == list(range(len(plan)))
    for batch in rows:
        sizes = [len(rank) for rank in batch]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= rows_per_batch


@given(length_lists, st.integers(1, 5), st.integers(1, 5))
def test_ranks_get_about_as_many_tokens(lengths, rows_per_batch, dp_size) -> None:
    plan = packed(lengths, rows_per_batch=rows_per_batch, dp_size=dp_size, last="repeat")
    for step in range(plan.batches.steps):
        ranks = [plan.row_tokens[plan.rows_of(step, rank)] for rank in range(dp_size)]
        tokens, rows = [int(rank.sum()) for rank in ranks], np.concatenate(ranks)
        assert max(tokens) - min(tokens) <= rows.max() - rows.min()


def test_rows_are_dealt_forth_and_back() -> None:
    plan = pack(np.arange(6), np.arange(13, 19), budget=24, rows_per_batch=2, dp_size=3, policy="cut")
    assert [plan.row_tokens[plan.rows_of(0, rank)].tolist() for rank in range(3)] == [[18, 13], [17, 14], [16, 15]]


@given(length_lists, st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))
def test_global_batches_are_the_same_under_another_world_size(lengths, unit, one, other) -> None:
    first, second = (
        packed(lengths, rows_per_batch=unit * rows, dp_size=ranks) for rows, ranks in ((one, other), (other, one))
    )
    assert first.samples.tolist() == second.samples.tolist()
    for step in range(first.batches.steps):
        batches = [
            sorted(row for rank in range(plan.batches.dp_size) for row in plan.rows_of(step, rank).tolist())
            for plan in (first, second)
        ]
        assert batches[0] == batches[1]


def test_a_row_that_holds_more_samples_than_a_small_window_is_filled_by_default() -> None:
    assert packed([2] * 4000, budget=4000).row_tokens.tolist() == [4000, 4000]


@pytest.mark.parametrize("budget", [1024, 2048])
@pytest.mark.parametrize("epoch", range(3))
def test_at_most_a_twentieth_is_wasted_on_real_chats(budget, epoch) -> None:
    order = epoch_order(CHATS.size, seed=0, epoch=epoch)
    for dp_size in (1, 4):
        plan = pack(order, CHATS, budget=budget, rows_per_batch=1, dp_size=dp_size, policy="leave_out")
        assert plan.samples.size == CHATS.size
        assert pad_fraction(plan) <= 0.03
        idle_counted = 1 - CHATS.sum() / (plan.batches.steps * dp_size * budget)
        assert idle_counted <= 0.05


def test_hardly_anything_is_wasted_on_a_larger_corpus() -> None:
    chats = np.tile(CHATS, 20)
    for budget in (1024, 2048):
        plan = pack(
            epoch_order(chats.size, seed=1, epoch=0), chats, budget=budget, rows_per_batch=4, dp_size=4, policy="cut"
        )
        assert pad_fraction(plan) < 0.02


def test_long_and_short_samples_are_spread_over_the_epoch() -> None:
    chats = np.tile(CHATS, 20)
    plan = pack(epoch_order(chats.size, seed=1, epoch=0), chats, budget=2048, rows_per_batch=1, dp_size=1, policy="cut")
    documents = np.diff(plan.starts)
    assert abs(np.corrcoef(documents[:-1], documents[1:])[0, 1]) < 0.15


def test_epochs_pack_other_samples_together() -> None:
    rows = []
    for epoch in range(2):
        order = epoch_order(CHATS.size, seed=0, epoch=epoch)
        plan = pack(order, CHATS, budget=1024, rows_per_batch=1, dp_size=1, policy="cut")
        rows.append({frozenset(plan.row(row)[0].tolist()) for row in range(len(plan))})
    assert len(rows[0] & rows[1]) < len(rows[0]) / 10


def test_a_hundred_thousand_samples_are_packed_in_no_time() -> None:
    chats = np.tile(CHATS, 250)
    order = epoch_order(chats.size, seed=0, epoch=0)
    start = time.process_time()
    pack(order, chats, budget=2048, rows_per_batch=4, dp_size=4, policy="cut")
    assert time.process_time() - start < 1


def test_impossible_numbers_are_refused() -> None:
    for name in ("budget", "window"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            packed([3], **{name: 0})
    with pytest.raises(ValueError, match="'split'; choose from cut, leave_out"):
        packed([3], policy="split")
    with pytest.raises(ValueError, match="nothing to pack: of 2 samples, 2 are empty"):
        packed([0, 0])


def test_rows_steps_and_ranks_outside_the_plan_are_errors() -> None:
    plan = packed([3, 3])
    for ask in (lambda: plan.row(1), lambda: plan.row(-1), lambda: plan.rows_of(1, 0), lambda: plan.rows_of(0, 1)):
        with pytest.raises(IndexError, match="outside"):
            ask()


def test_the_fields_of_a_padded_row_are_these() -> None:
    fields = packed_fields(np.array([3, 2]), 8)
    assert fields.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert fields.doc_remaining.tolist() == [2, 1, 0, 1, 0, 0, 0, 0]
    assert fields.attention_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert fields.seq_lens.tolist() == [3, 5]
    assert fields.cu_seqlens.tolist() == [0, 3, 8]
    assert fields.cu_seqlens.dtype == np.int32


def test_the_fields_of_a_row_with_one_document_are_these() -> None:
    fields = packed_fields(np.array([7]), 8)
    assert fields.seq_lens.tolist() == [8]
    assert fields.doc_remaining.tolist() == [6, 5, 4, 3, 2, 1, 0, 0]


def check_row(fields: PackedFields, lengths: np.ndarray, width: int) -> None:
    """What must hold of one row, document by document."""
    assert fields.seq_lens.sum() == width
    assert fields.cu_seqlens.tolist() == [0, *np.cumsum(fields.seq_lens)]
    assert fields.attention_mask.tolist() == [1] * lengths.sum() + [0] * (width - lengths.sum())
    assert fields.position_ids.max() < width
    for (start, stop), length in zip(pairwise(fields.cu_seqlens.tolist()), lengths.tolist(), strict=True):
        assert fields.position_ids[start:stop].tolist() == list(range(stop - start))
        remaining = [*range(length - 1, -1, -1)] + [0] * (stop - start - length)
        assert fields.doc_remaining[start:stop].tolist() == remaining


@given(row_lengths, st.integers(0, 20))
def test_fields_hold_for_any_row(lengths, pad) -> None:
    width = int(lengths.sum()) + pad
    check_row(packed_fields(lengths, width), lengths, width)


@given(length_lists, st.integers(1, 30))
def test_fields_hold_for_every_packed_row(lengths, budget) -> None:
    plan = packed(lengths, budget=budget)
    for row in range(len(plan)):
        check_row(packed_fields(plan.row(row)[1], budget), plan.row(row)[1], budget)


@given(st.lists(row_lengths, min_size=1, max_size=4))
def test_stacked_rows_are_filled_up_with_documents_of_no_tokens(rows) -> None:
    width = max(int(lengths.sum()) for lengths in rows)
    single = [packed_fields(lengths, width) for lengths in rows]
    batch = stack_fields(single)
    assert batch.seq_lens.shape == (len(rows), max(lengths.size for lengths in rows))
    assert batch.seq_lens.sum(axis=1).tolist() == [width] * len(rows)
    assert batch.cu_seqlens[-1] == width * len(rows)
    assert np.diff(batch.cu_seqlens).tolist() == batch.seq_lens[batch.seq_lens > 0].tolist()
    for name in ("position_ids", "doc_remaining", "attention_mask"):
        assert getattr(batch, name).tolist() == [getattr(row, name).tolist() for row in single]


def test_rows_that_are_none_are_refused() -> None:
    for lengths in ([], [3, 0], [5, 4]):
        with pytest.raises(ValueError, match="documents of 1 to 8 tokens in all"):
            packed_fields(np.array(lengths, np.int64), 8)
    with pytest.raises(ValueError, match=r"2 rows of widths \[4, 5\]"):
        stack_fields([packed_fields(np.array([3]), width) for width in (4, 5)])
