"""Rows of conversations, or of tokens, from their specification."""

from collections.abc import Sequence
from enum import Enum
from os import PathLike

from dspark_store.sources.chat import ChatSource
from dspark_store.sources.specs import SourceContext


class Unset(Enum):
    """The default of an option whose value None means something of its own."""

    UNSET = "as the job says"


def build_chat(
    context: SourceContext,
    *,
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    subset: str | None = None,
    split: str | Unset | None = Unset.UNSET,
    shuffle_seed: int | Unset | None = Unset.UNSET,
    on_bad_row: str | None = None,
    max_refused: float | None = None,
    min_supervised: int | None = None,
    over_long: str | None = None,
    truncation_side: str | None = None,
    mask_reasoning_content: bool | None = None,
    mask_headers: bool | None = None,
) -> ChatSource:
    """Build a source of conversations; what its specification leaves out is as the job says. See `ChatSource`."""
    return ChatSource(
        path,
        context.tokenizer("chat"),
        seq_length=context.seq_length,
        split=context.split if split is Unset.UNSET else split,
        shuffle_seed=context.shuffle_seed if shuffle_seed is Unset.UNSET else shuffle_seed,
        mask_reasoning_content=_given(mask_reasoning_content, context.mask_reasoning_content),
        max_samples=context.max_samples,
        num_workers=context.num_workers,
        mask_headers=_given(mask_headers, context.mask_headers),
        truncation_side=context.truncation_side if truncation_side is None else truncation_side,
        over_long=_given(over_long, context.over_long),
        min_supervised=_given(min_supervised, context.min_supervised),
        on_bad_row=_given(on_bad_row, context.on_bad_row),
        max_refused=_given(max_refused, context.max_refused),
        subset=subset,
        vocab_size=context.vocab_size,
    )


def build_tokens(
    context: SourceContext,
    *,
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    subset: str | None = None,
    split: str | Unset | None = Unset.UNSET,
    shuffle_seed: int | Unset | None = Unset.UNSET,
    on_bad_row: str | None = None,
    max_refused: float | None = None,
    min_supervised: int | None = None,
    over_long: str | None = None,
    truncation_side: str | None = None,
) -> ChatSource:
    """Build a source of rows that are tokens already, which needs no tokenizer. See `ChatSource`."""
    return ChatSource(
        path,
        None,
        seq_length=context.seq_length,
        split=context.split if split is Unset.UNSET else split,
        shuffle_seed=context.shuffle_seed if shuffle_seed is Unset.UNSET else shuffle_seed,
        max_samples=context.max_samples,
        num_workers=context.num_workers,
        truncation_side=context.truncation_side if truncation_side is None else truncation_side,
        over_long=_given(over_long, context.over_long),
        min_supervised=_given(min_supervised, context.min_supervised),
        on_bad_row=_given(on_bad_row, context.on_bad_row),
        max_refused=_given(max_refused, context.max_refused),
        subset=subset,
        vocab_size=context.vocab_size,
    )


def _given[T](option: T | None, of_job: T) -> T:
    return of_job if option is None else option
