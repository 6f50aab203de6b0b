"""Rows of conversations, or of tokens, from their specification."""

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from os import PathLike
from typing import Annotated

from dspark_store.sources.chat import ChatSource
from dspark_store.sources.options import ChatOptions, RowOptions, options_of
from dspark_store.sources.registry import SourceContext


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
    **options: Annotated[object, ChatOptions],
) -> ChatSource:
    """Build a source of conversations; what its specification leaves out is as the job says. See `ChatSource`."""
    return ChatSource(
        path,
        context.tokenizer("chat"),
        options_of(context, options),
        seq_length=context.seq_length,
        split=context.split if split is Unset.UNSET else split,
        shuffle_seed=context.shuffle_seed if shuffle_seed is Unset.UNSET else shuffle_seed,
        max_samples=context.max_samples,
        num_workers=context.num_workers,
        subset=subset,
        vocab_size=context.vocab_size,
        today=context.today,
        recorded=context.recorded,
    )


def build_tokens(
    context: SourceContext,
    *,
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    subset: str | None = None,
    split: str | Unset | None = Unset.UNSET,
    shuffle_seed: int | Unset | None = Unset.UNSET,
    **options: Annotated[object, RowOptions],
) -> ChatSource:
    """Build a source of rows that are tokens already, which needs no tokenizer. See `ChatSource`."""
    chosen = options_of(context, options)
    return ChatSource(
        path,
        None,
        ChatOptions(**{option.name: getattr(chosen, option.name) for option in fields(RowOptions)}),
        seq_length=context.seq_length,
        split=context.split if split is Unset.UNSET else split,
        shuffle_seed=context.shuffle_seed if shuffle_seed is Unset.UNSET else shuffle_seed,
        max_samples=context.max_samples,
        num_workers=context.num_workers,
        subset=subset,
        vocab_size=context.vocab_size,
    )
