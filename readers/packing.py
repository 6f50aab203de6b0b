"""Several samples in one row of a token budget: the plan, from lengths alone, and the fields that tell them apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from dspark_store.readers.order import BatchPlan, EndRule

type LongPolicy = Literal["cut", "leave_out"]

_LEAST_WINDOW = 256
_ROWS_IN_WINDOW = 8
_ROW_BITS = 40


@dataclass(frozen=True, eq=False)
class PackPlan:
    """The packed rows of an epoch, and how they fall into batches.

    Row i holds the documents ``starts[i]`` to ``starts[i + 1]`` of ``samples`` (M,) int64 and ``lengths`` (M,) int64,
    the tokens kept of each from its beginning. Rows do not depend on the world size. ``cut``, ``left_out`` and
    ``empty`` count samples of the order that were shortened to the budget, longer than it, and of no tokens.
    """

    budget: int
    samples: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    cut: int
    left_out: int
    empty: int
    batches: BatchPlan

    def __len__(self) -> int:
        return self.starts.size - 1

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """(rows,) int64: real tokens of each row."""
        return np.add.reduceat(self.lengths, self.starts[:-1])

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of a row and the tokens kept of each, in the order they stand in the row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is outside the epoch's {len(self)} packed rows")
        documents = slice(self.starts[row], self.starts[row + 1])
        return self.samples[documents], self.lengths[documents]

    def rows_of(self, step: int, dp_rank: int) -> np.ndarray:
        """Return the rows that a rank gets at ``step``, int64, the fullest first; IndexError when there are none such.

        The rows of the global batch are dealt by falling number of tokens, forth and back over the ranks: ranks' sizes
        differ by at most one row, and at equal sizes their tokens by no more than those of the fullest and the emptiest
        row.
        """
        if not 0 <= dp_rank < self.batches.dp_size:
            raise IndexError(f"dp_rank {dp_rank} is outside the {self.batches.dp_size} ranks")
        rows = self.batches.global_positions(step)
        falling = rows[np.argsort(-self.row_tokens[rows], kind="stable")]
        turn, seat = np.divmod(np.arange(rows.size), self.batches.dp_size)
        ranks = np.where(turn % 2, self.batches.dp_size - 1 - seat, seat)
        dealt: np.ndarray = falling[ranks == dp_rank]
        return dealt


def check_packing(budget: int | None, policy: LongPolicy) -> None:
    """Raise ValueError for a budget below 1 or an unknown policy."""
    if budget is not None and budget < 1:
        raise ValueError(f"budget must be >= 1, got {budget}")
    if policy not in ("cut", "leave_out"):
        raise ValueError(f"the policy for samples over the budget is {policy!r}; choose from cut, leave_out")


def pack(
    order: np.ndarray,
    lengths: np.ndarray,
    *,
    budget: int,
    rows_per_batch: int,
    dp_size: int,
    policy: LongPolicy,
    last: EndRule = "short",
    window: int | None = None,
) -> PackPlan:
    """Plan the packed rows of an epoch.

    ``order`` holds the epoch's samples (see ``epoch_order``) and ``lengths``, (N,), the tokens of every sample of the
    store. The order is taken in windows of ``window`` samples, each packed by best fit, longest first; a row takes
    samples of the window that opened it and of the next one, so none moves further than two windows. A larger window
    wastes less and shuffles less; the default is 256 samples, or 8 mean rows where that is more. ``policy`` says what
    happens to a sample longer than the budget. ValueError when no sample has a place, or for a number below 1.
    """
    check_packing(budget, policy)
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    wanted = lengths[order].astype(np.int64)
    long = wanted > budget
    kept = (wanted > 0) if policy == "cut" else (wanted > 0) & ~long
    if not kept.any():
        raise ValueError(
            f"nothing to pack: of {order.size} samples, {int((wanted == 0).sum())} are empty and {int(long.sum())} are "
            f"longer than the budget of {budget} tokens"
        )
    samples, sizes = order[kept].astype(np.int64), np.minimum(wanted[kept], budget)
    rows = _best_fit(sizes, budget, window or _default_window(sizes, budget))
    by_row = np.argsort(rows, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(rows))))
    return PackPlan(
        budget=budget,
        samples=samples[by_row],
        lengths=sizes[by_row],
        starts=starts,
        cut=int(long.sum()) if policy == "cut" else 0,
        left_out=int(long.sum()) if policy == "leave_out" else 0,
        empty=int((wanted == 0).sum()),
        batches=BatchPlan(starts.size - 1, rows_per_batch, dp_size, last),
    )


def _default_window(sizes: np.ndarray, budget: int) -> int:
    return max(_LEAST_WINDOW, _ROWS_IN_WINDOW * budget * sizes.size // int(sizes.sum()))


def _best_fit(sizes: np.ndarray, budget: int, window: int) -> np.ndarray:
    """Return the row of each document; rows are numbered by the position of the document that opened them.

    Best fit goes by length within a window, so the documents that open rows come longest first. Numbering rows by
    their openers' positions, which are random in a shuffled order, undoes that.
    """
    assigned = np.empty(sizes.size, np.int64)
    openers: list[int] = []
    rooms: list[int] = []  # open rows as room << _ROW_BITS | row, ascending
    row_of = (1 << _ROW_BITS) - 1
    for first in range(0, sizes.size, window):
        oldest = len(openers)
        part = sizes[first : first + window]
        falling = np.argsort(-part, kind="stable")
        rows = []
        for document, size in zip(falling.tolist(), part[falling].tolist(), strict=True):
            tightest = bisect_left(rooms, size << _ROW_BITS)
            if tightest < len(rooms):
                room, row = divmod(rooms.pop(tightest), 1 << _ROW_BITS)
            else:
                room, row = budget, len(openers)
                openers.append(first + document)
            rows.append(row)
            if room > size:
                insort(rooms, room - size << _ROW_BITS | row)
        assigned[first + falling] = rows
        rooms = [room for room in rooms if room & row_of >= oldest]
    number = np.empty(len(openers), np.int64)
    number[np.argsort(np.array(openers))] = np.arange(len(openers))
    return number[assigned]


@dataclass(frozen=True, slots=True, eq=False)
class PackedFields:
    """What tells the documents of packed rows apart: of one row of W tokens, or of B stacked rows (first axis B).

    ``position_ids`` (W,) int64 starts at 0 in each document and goes on through the trailing pad. ``doc_remaining``
    (W,) int64 is how many real tokens of the same document come after a slot, 0 on pad. ``attention_mask`` (W,) int64
    is 1 for real tokens. ``seq_lens`` (documents,) int64, the lengths with the trailing pad counted to the last
    document, sums to W; stacked rows are filled up with 0. ``cu_seqlens`` int32 is their prefix sums from 0, of stacked
    rows those of all documents one after the other, as kernels for flattened batches want them. The rules are those of
    NeMo Automodel's packing for speculative-decoding drafts.
    """

    position_ids: np.ndarray
    doc_remaining: np.ndarray
    attention_mask: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens: np.ndarray


def packed_fields(lengths: np.ndarray, budget: int) -> PackedFields:
    """Return the fields of one row of ``budget`` tokens that holds documents of ``lengths``, (documents,), all >= 1.

    ValueError when there is no document, one has no tokens, or they do not fit.
    """
    sizes = np.asarray(lengths, np.int64)
    if not sizes.size or sizes.min() < 1 or sizes.sum() > budget:
        raise ValueError(f"a packed row needs documents of 1 to {budget} tokens in all, got lengths {sizes.tolist()}")
    used = int(sizes.sum())
    seq_lens = sizes.copy()
    seq_lens[-1] += budget - used
    ends = np.cumsum(seq_lens)
    slots = np.arange(budget)
    remaining = np.repeat(np.cumsum(sizes), seq_lens) - 1 - slots
    return PackedFields(
        position_ids=slots - np.repeat(ends - seq_lens, seq_lens),
        doc_remaining=np.maximum(remaining, 0),
        attention_mask=(slots < used).astype(np.int64),
        seq_lens=seq_lens,
        cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
    )


def stack_fields(rows: Sequence[PackedFields]) -> PackedFields:
    """Stack rows of one width into a batch; ValueError when there is none or their widths differ."""
    widths = sorted({row.position_ids.size for row in rows})
    if len(widths) != 1:
        raise ValueError(f"a packed batch needs rows of one width, got {len(rows)} rows of widths {widths}")
    most = max(row.seq_lens.size for row in rows)
    ends = np.cumsum(np.concatenate([row.seq_lens for row in rows]))
    return PackedFields(
        position_ids=np.stack([row.position_ids for row in rows]),
        doc_remaining=np.stack([row.doc_remaining for row in rows]),
        attention_mask=np.stack([row.attention_mask for row in rows]),
        seq_lens=np.stack([np.pad(row.seq_lens, (0, most - row.seq_lens.size)) for row in rows]),
        cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
    )
