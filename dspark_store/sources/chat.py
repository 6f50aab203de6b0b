"""Conversations in a JSON Lines or JSON file as a source of samples."""

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.encode import Encoder, EncoderSettings, RawRow, encode_in_workers
from dspark_store.sources.jsonl import open_rows
from dspark_store.sources.order import select_rows
from dspark_store.sources.source import Sample, SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatSource:
    """One sample a conversation: its chat-template tokens, and a mask of what the assistant said.

    The file is read through once here, for its content hash and the place of every row, and then by offset, so
    that memory does not grow with it. Rows are checked when they are read.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        seq_length: int,
        split: str | None = None,
        shuffle_seed: int | None = None,
        mask_reasoning_content: bool = False,
        max_samples: int | None = None,
        num_workers: int = 0,
    ) -> None:
        """Open the file and check the options.

        Args:
            path: a .jsonl or .ndjson file of one conversation a line, or a .json file of a list of them.
            tokenizer: with a chat template (see `apply_chat_template_option`).
            seq_length: longer conversations are cut to this many tokens, at the tokenizer's `truncation_side`.
            split: None or `name[a:b]`, a slice of the rows after the shuffle.
            shuffle_seed: None for the order of the file, else the seed of the permutation of `order.select_rows`.
            mask_reasoning_content: do not supervise the `reasoning_content` of assistant messages.
            max_samples: read at most this many rows, after shuffle and split.
            num_workers: processes that tokenise; 0 for this one. The samples are the same.

        Raises:
            FileNotFoundError: there is no such file.
            SourceError: the file has no rows, or an option or the chat template cannot be used.

        """
        if seq_length < 1:
            raise SourceError(f"seq_length is {seq_length}; expected at least 1")
        if num_workers < 0:
            raise SourceError(f"num_workers is {num_workers}; expected 0 or more")
        self._settings = EncoderSettings(tokenizer, seq_length, tokenizer.truncation_side, mask_reasoning_content)
        self._encoder = Encoder(self._settings)
        self._file = open_rows(path)
        self._rows = select_rows(len(self._file), split=split, shuffle_seed=shuffle_seed, max_samples=max_samples)
        self._num_workers = num_workers
        self._identity: dict[str, JsonValue] = {
            "type": "chat",
            "content_sha256": self._file.content_sha256,
            "split": split,
            "shuffle_seed": shuffle_seed,
            "max_samples": max_samples,
            "mask_reasoning_content": mask_reasoning_content,
            "truncation_side": self._settings.truncation_side,
        }

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples beside the tokenizer, its template and `seq_length`."""
        return dict(self._identity)

    def __len__(self) -> int:
        """Return the number of rows after split, shuffle and `max_samples`."""
        return len(self._rows)

    def read(self, start: int = 0) -> Iterator[Sample]:
        """Yield the samples of the rows from position `start` on.

        Raises:
            ValueError: `start` is not in [0, len].
            SourceError: a row cannot be used (the message names the file and the line), or the file was changed.

        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start is {start}; expected 0 to {len(self)}, the number of records")
        rows = self._raw_rows(start)
        if self._num_workers:
            return encode_in_workers(self._settings, rows, self._num_workers)
        return map(self._encoder.encode, rows)

    def _raw_rows(self, start: int) -> Iterator[RawRow]:
        rows = self._rows[start:]
        for row, text in zip(rows, self._file.read(rows), strict=True):
            yield self._file.where(row), text
