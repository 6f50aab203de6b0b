"""From the data of rows to their samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dspark_store.sources.cutting import Cut, Cutting, cut
from dspark_store.sources.limits import ProcessorTimeError, run_limited
from dspark_store.sources.masks import MaskOptions, Rendered, loss_mask, render_with_spans
from dspark_store.sources.messages import Conversation, read_conversation
from dspark_store.sources.options import ChatOptions
from dspark_store.sources.rendering import DEFAULT_LIMITS, Renderer, RenderLimits
from dspark_store.sources.rows import RowData, parse_row
from dspark_store.sources.source import SourceError
from dspark_store.sources.tokenrows import read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What an encoder is made from. It travels to worker processes, so it holds nothing that cannot be pickled.

    Attributes:
        tokenizer: with a chat template; None if all rows are tokens already.
        seq_length: the most tokens of a sample.
        options: how rows become samples; the side where they are cut is given.
        vocab_size: the ids of rows that are tokens already must be below it, if given.
        limits: what rendering one row may take.

    """

    tokenizer: "PreTrainedTokenizerBase | None"
    seq_length: int
    options: ChatOptions
    vocab_size: int | None = None
    limits: RenderLimits = DEFAULT_LIMITS

    @property
    def cutting(self) -> Cutting:
        """What becomes of long rows."""
        options = self.options
        return Cutting(self.seq_length, options.over_long, options.truncation_side or "right", options.min_supervised)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What became of one row: its pieces, or why it cannot be used. Messages do not name the place.

    Attributes:
        cut: the pieces.
        error: what is wrong with the row.
        fatal: and that it ends the reading, also where rows that cannot be used are skipped.
        empty: the row renders to no tokens, which is wrong too.
        replaced: lone surrogates were replaced.
        warnings: what was odd about it.

    """

    cut: Cut = field(default_factory=lambda: Cut([]))
    error: str | None = None
    fatal: bool = False
    empty: bool = False
    replaced: bool = False
    warnings: list[str] = field(default_factory=list)


class Encoder:
    """Turns rows into samples of at most `seq_length` tokens, many in one call of the tokenizer."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Look at the tokenizer's template; SourceError if it cannot be used."""
        self._settings = settings
        self._cutting = settings.cutting
        self._masking = MaskOptions(settings.options.mask_reasoning_content, settings.options.mask_headers)
        date = None if settings.options.template_date is None else str(settings.options.template_date)
        self._renderer: Renderer | None = None
        if settings.tokenizer is not None:
            self._renderer = Renderer(settings.tokenizer, date=date, limits=settings.limits)

    def encode(self, rows: Sequence[RowData]) -> list[Encoded]:
        """Return what becomes of each row, up to one that is fatal."""
        read: list[_Read] = []
        for data in rows:
            read.append(self._read(data))
            if read[-1].fatal:
                break
        rendered = [row.content for row in read if isinstance(row.content, Rendered)]
        texts = [conversation.text for conversation in rendered]
        tokens = iter(self._renderer.tokenise(texts) if self._renderer is not None else [])
        encoded = []
        for row in read:
            if isinstance(row.content, str):
                encoded.append(Encoded(error=row.content, fatal=row.fatal))
            elif isinstance(row.content, Rendered) and self._renderer is not None:
                its = next(tokens)
                mask = loss_mask(self._renderer, row.content, its)
                encoded.append(self._cut(its.ids, mask, row.replaced, row.content.warnings))
            elif isinstance(row.content, tuple):
                encoded.append(self._cut(*row.content, row.replaced, []))
        return encoded

    @property
    def may_ask_clock(self) -> bool:
        """Whether some row can make the template ask the clock."""
        return self._renderer is not None and self._renderer.may_ask_clock

    def asks_clock(self, rows: Sequence[RowData]) -> bool:
        """Tell whether the template asks the clock for any of the rows; a date must be given."""
        return any(map(self._asks_clock, rows))

    def _asks_clock(self, data: RowData) -> bool:
        renderer = self._renderer
        if renderer is None:
            return False
        try:
            row, _ = parse_row(data)
            if row.get("input_ids") is not None:
                return False
            conversation = read_conversation(row)
            return run_limited(lambda: renderer.asks_clock(conversation), renderer.limits.seconds)
        except (SourceError, ProcessorTimeError):  # told when the row is encoded
            return False

    def _read(self, data: RowData) -> "_Read":
        try:
            row, replaced = parse_row(data)
            if replaced and self._settings.options.on_bad_row == "error":
                raise SourceError("the row holds half of a surrogate pair, which is no Unicode text")
            if row.get("input_ids") is not None:
                return _Read(read_tokens(row, self._settings.vocab_size), replaced)
            if self._renderer is None:
                raise SourceError(
                    f"the row has no input_ids, and this source has no tokenizer; its keys are {sorted(row)}"
                )
            return _Read(self._rendered(self._renderer, read_conversation(row)), replaced)
        except ProcessorTimeError as error:
            return _Read(f"the chat template takes {error} for the row; does it end?", fatal=True)
        except SourceError as error:
            return _Read(str(error))

    def _rendered(self, renderer: Renderer, conversation: Conversation) -> Rendered:
        seconds = renderer.limits.seconds
        return run_limited(lambda: render_with_spans(renderer, conversation, self._masking), seconds)

    def _cut(self, ids: NDArray[np.int32], mask: NDArray[np.uint8], replaced: bool, warnings: list[str]) -> Encoded:
        if not len(ids):
            return Encoded(error="the row has no tokens (does the chat template render anything?)", empty=True)
        return Encoded(cut(ids, mask, self._cutting), replaced=replaced, warnings=warnings)


@dataclass(frozen=True, slots=True)
class _Read:
    """A row before its text is tokenised: its text, its tokens, or what is wrong with it."""

    content: Rendered | tuple[NDArray[np.int32], NDArray[np.uint8]] | str
    replaced: bool = False
    fatal: bool = False
