"""A Megatron pair as a source of samples."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray

from dspark_store.format.jsonvalue import JsonValue
from dspark_store.sources.megatron.pair import IndexedPair, open_pair, pair_files
from dspark_store.sources.megatron.plans import MegatronOptions, Plan, Span, plan_documents, plan_windows
from dspark_store.sources.registry import OwnOrder, SourceContext
from dspark_store.sources.row_order import select_rows
from dspark_store.sources.source import Sample, Source, SourceError, SourceReport

_IDS_END = 1 << 31  # ids are int32


class MegatronSource(Source):
    """The documents, or the windows, of a `.bin` and `.idx` pair.

    Opening reads the index only. `identity` reads both files through, for their SHA-256. A cursor is the number of
    samples before it.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        options: MegatronOptions | None = None,
        *,
        seq_length: int,
        vocab_size: int | None = None,
        split: str | None = None,
        shuffle_seed: int | None = None,
        max_samples: int | None = None,
        min_supervised: int = 0,
    ) -> None:
        """Open the pair, check it, and lay its samples out.

        Args:
            path: the prefix of the pair, or either of its files.
            options: see `MegatronOptions`; None: the documents.
            seq_length: the longest sample.
            vocab_size: ids must be below it; None: below 2^31. They are checked when they are read.
            split: None or `name[a:b]`, a slice of the records, as `select_rows` takes it.
            shuffle_seed: of documents: None for the order of the file, else as `select_rows` shuffles. Of windows:
                their seed where the options have none.
            max_samples: read at most this many records.
            min_supervised: leave out samples of fewer supervised tokens.

        Raises:
            FileNotFoundError: one of the files is not there.
            SourceError: the pair is damaged or holds no ids, or an option cannot be used.

        """
        if seq_length < 1:
            raise SourceError(f"seq_length is {seq_length}; expected at least 1")
        options = MegatronOptions() if options is None else options
        self._options = options
        self._pair = open_pair(path, skip_images=options.skip_images)
        self._name = self._pair.prefix
        if self._pair.dtype.kind == "f":
            raise SourceError(
                f"{pair_files(self._name)[0]} holds values of the dtype {self._pair.dtype.name}; "
                "expected token ids, which are integers"
            )
        if not self._pair.num_tokens:
            raise SourceError(f"{self._name} holds no tokens; expected at least one document that is not empty")
        self._masks = self._open_masks()
        self._ids_end = _IDS_END if vocab_size is None else vocab_size
        self._min_supervised = min_supervised
        try:
            self._plan, own = self._planned(seq_length, split, shuffle_seed, max_samples)
        except SourceError as error:
            raise SourceError(f"{self._name}: {error}") from error
        self._choice: dict[str, JsonValue] = {
            "mode": options.mode,
            "skip_images": options.skip_images,
            "split": split,
            "max_samples": max_samples,
            "min_supervised": min_supervised,
            **own,
        }
        self._report = SourceReport()
        self._sha256: dict[str, str] | None = None

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the samples beside `seq_length`; the first call reads the files through.

        Raises:
            SourceError: a file was changed since it was opened.

        """
        if self._sha256 is None:
            self._sha256 = self._pair.sha256()
            if self._masks is not None:
                self._sha256 |= {f"loss_mask_{name}": digest for name, digest in self._masks.sha256().items()}
        return {"type": "megatron", **self._sha256, **self._choice}

    def __len__(self) -> int:
        """Return the number of records: documents, the empty ones included, or windows."""
        return len(self._plan.lengths)

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens that each record gives, int64, shape (records,), after what `over_long` takes away."""
        return self._plan.lengths

    def read(self, cursor: int = 0) -> Iterator[Sample]:
        """Yield the samples from a cursor on, in order.

        Raises:
            ValueError: there is no such cursor.
            SourceError: an id is not in the vocabulary, a value of the loss mask is not 0 or 1, or a file was changed.

        """
        end = self._plan.num_samples
        if not 0 <= cursor <= end:
            raise ValueError(f"cursor is {cursor}; expected 0 to {end}, the number of samples")
        self._require_unchanged()
        return self._read(cursor)

    def report(self) -> SourceReport:
        """Return what became of the records read so far, by all calls of `read` together."""
        return self._report

    def where(self, record: int) -> str:
        """Return the pair and the document or window of a record, for messages."""
        return f"{self._name}, {self._plan.name(record)}"

    def record_of(self, cursor: int) -> int:
        """Return the number of records that are done at a cursor."""
        return self._plan.records_before(cursor)

    def sample(self, record: int) -> Sample:
        """Return the first sample of one record.

        Raises:
            IndexError: there is no such record.
            SourceError: the record gives no sample (an empty document, or one left out), or as `read`.

        """
        if not 0 <= record < len(self):
            raise IndexError(f"record is {record}; expected 0 to {len(self) - 1}")
        self._require_unchanged()
        number = self._plan.first_sample(record)
        if number is None:
            raise SourceError(f"{self.where(record)} gives no sample: it is {self._plan.outcome(record)}")
        sample = self._sample(number)
        if not self._is_kept(sample):
            raise SourceError(
                f"{self.where(record)} gives no sample: {int(sample.loss_mask.sum())} of its tokens are "
                f"supervised, and min_supervised is {self._min_supervised}"
            )
        return sample

    def _planned(
        self, seq_length: int, split: str | None, shuffle_seed: int | None, max_samples: int | None
    ) -> tuple[Plan, dict[str, JsonValue]]:
        """Return the plan, and what of the options decides it."""
        options, pair = self._options, self._pair
        if options.mode == "window":
            settings = options.window_settings(seq_length, shuffle_seed)
            own: dict[str, JsonValue] = {
                **asdict(settings),
                "carry_next_token": options.carries,
                "eod_token_id": options.eod_token_id,
                "parts": options.parts,
                "part": None if options.parts is None else options.part,
            }
            return plan_windows(pair, options, settings, split, max_samples), own
        starts = pair.document_starts()
        chosen = select_rows(len(starts) - 1, split=split, shuffle_seed=shuffle_seed, max_samples=max_samples)
        rows = np.arange(chosen.start, chosen.stop) if isinstance(chosen, range) else np.asarray(chosen)
        plan = plan_documents(starts, rows, seq_length, options.over_long)
        return plan, {"over_long": options.over_long, "shuffle_seed": shuffle_seed}

    def _open_masks(self) -> IndexedPair | None:
        if self._options.loss_mask is None:
            return None
        masks = open_pair(self._options.loss_mask, skip_images=self._options.skip_images)
        pairs = zip((masks.starts, masks.boundaries), (self._pair.starts, self._pair.boundaries), strict=True)
        if not all(np.array_equal(theirs, ours) for theirs, ours in pairs):
            raise SourceError(
                f"{masks.prefix} is not the loss mask of {self._name}: its sequences or documents are not of "
                "the same lengths; expected one value, 0 or 1, for each token"
            )
        return masks

    def _read(self, cursor: int) -> Iterator[Sample]:
        plan, report = self._plan, self._report
        record = plan.records_before(cursor) if cursor else 0  # empty ones at the beginning are counted too
        given = 0  # samples that the record being read has given
        for number in range(cursor, plan.num_samples):
            sample = self._sample(number)
            kept = self._is_kept(sample)
            report.add_samples([sample.loss_mask] * kept)
            report.too_few_supervised += not kept
            given += kept
            done = plan.records_before(number + 1)
            for passed in range(record, done):
                self._count(plan.outcome(passed), given)
            if done > record:
                record, given = done, 0
            if kept:
                yield sample

    def _sample(self, number: int) -> Sample:
        spans = self._plan.spans(number)
        ids = np.concatenate([self._ids(span) for span in spans])
        if self._masks is None:
            mask = np.ones(len(ids), np.uint8)
        else:
            mask = np.concatenate([_mask_values(self._masks, span) for span in spans])
        if self._options.eod_token_id is not None:
            mask[1:][ids[:-1] == self._options.eod_token_id] = 0
        return Sample(ids, mask, number + 1)

    def _count(self, outcome: str, given: int) -> None:
        """Count a record that gave so many samples. An empty one is no refusal, for the format allows it."""
        report = self._report
        report.read += 1
        report.empty += outcome == "empty"
        report.dropped += outcome == "dropped"
        if given and outcome not in ("empty", "dropped"):
            report.kept += 1
            report.truncated += outcome == "truncated"
            report.split += outcome == "split"

    def _ids(self, span: Span) -> NDArray[np.int32]:
        values = cast(NDArray[np.integer], self._pair.stream(*span))  # floats are refused when the pair is opened
        if values.min() < 0 or values.max() >= self._ids_end:
            position = int(np.flatnonzero((values < 0) | (values >= self._ids_end))[0])
            raise SourceError(
                f"{self._pair.where(span[0] + position)} is the id {values[position]}; expected 0 to "
                f"{self._ids_end - 1}: the corpus was made with another tokenizer"
            )
        return values.astype(np.int32)

    def _is_kept(self, sample: Sample) -> bool:
        return int(sample.loss_mask.sum()) >= self._min_supervised

    def _require_unchanged(self) -> None:
        self._pair.require_unchanged()
        if self._masks is not None:
            self._masks.require_unchanged()


@dataclass(frozen=True, slots=True)
class _OwnIds(OwnOrder):
    vocab_size: int | None


def build_megatron(
    context: SourceContext,
    *,
    path: str | PathLike[str],
    **options: Annotated[Any, MegatronOptions, _OwnIds],  # noqa: ANN401 - the registry looks at their types
) -> MegatronSource:
    """Build a Megatron source from a specification; what that leaves out is as the job says. See `MegatronSource`."""
    context = context.taking(options, _OwnIds)
    if options.get("mode") == "window":
        options.setdefault("num_samples", context.num_samples)
    else:
        options.setdefault("over_long", context.over_long)
    return MegatronSource(
        path,
        MegatronOptions(**{name: value for name, value in options.items() if value is not None}),
        seq_length=context.seq_length,
        vocab_size=context.vocab_size,
        split=context.split,
        shuffle_seed=context.shuffle_seed,
        max_samples=context.max_samples,
        min_supervised=context.min_supervised,
    )


def _mask_values(masks: IndexedPair, span: Span) -> NDArray[np.uint8]:
    values = masks.stream(*span)
    known = (values == 0) | (values == 1)
    if not known.all():
        position = int(np.flatnonzero(~known)[0])
        raise SourceError(f"{masks.where(span[0] + position)} is {values[position]}; a loss mask holds 0 and 1")
    return values.astype(np.uint8)
