"""Single samples of a store, whatever its phase: tokens, the tokenizer that they are of, and norms of their states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.ledger import token_ledger
from dspark_store.format.manifest import Manifest
from dspark_store.format.schema import IDS, LAST, LAYERS, MASK, SOURCE_CURSOR, TOKEN_OBJECTS
from dspark_store.format.storage import Storage
from dspark_store.format.token_shards import read_token_shard, sample_digest
from dspark_store.readers.cache import Cache
from dspark_store.sources.identity import tokenizer_sha256
from dspark_store.target.source import TargetSource, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Valid tokens of sample ``number``: ``input_ids`` (length,) int32 and ``loss_mask`` (length,) uint8, 0 or 1."""

    number: int
    input_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class StateNorms:
    """A layer's states over the tokens of a sample; ``layer_id`` is None for the last hidden states.

    ``mean_norm``, ``least_norm`` and ``most_norm`` are of the Euclidean norms of the tokens whose states are finite,
    ``least`` and ``most`` the values among them; all are NaN where there is no such token. ``nonfinite`` counts the
    values that are not finite.
    """

    layer_id: int | None
    mean_norm: float
    least_norm: float
    most_norm: float
    least: float
    most: float
    nonfinite: int


class SampleReader:
    """Reads samples of a store that may still be growing."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._grid = cache.schema.tokens
        self._growing_tokens = cache.record.phase == "tokens"
        self._with_states = frozenset(cache.index.committed())
        self.samples = _samples_so_far(cache.storage, self._grid.shard_size) if self._growing_tokens else len(cache)
        """How many samples there are, so far."""

    def check(self, sample: int) -> None:
        """Raise ValueError when there is no such sample, or not yet."""
        if not 0 <= sample < self.samples:
            so_far = " so far" if self._growing_tokens else ""
            raise ValueError(
                f"sample {sample} is not in the store {self._cache.storage}: it has {self.samples:,} samples{so_far}, "
                "counted from 0"
            )

    def tokens(self, sample: int) -> SampleTokens:
        """Read a sample's tokens; DamagedStoreError when they are not what was written."""
        if self._growing_tokens:
            shard, row = divmod(sample, self._grid.shard_size)
            rows = read_token_shard(self._cache.storage, self._cache.record, shard)
            return SampleTokens(sample, rows.ids[row], rows.masks[row])
        return read_tokens(self._cache, sample)

    def has_states(self, sample: int) -> bool:
        """Whether a sample's states are there."""
        return sample // self._grid.shard_size in self._with_states

    def norms(self, sample: int, layers: Sequence[int] | None = None) -> list[StateNorms]:
        """Measure captured layers of a sample, all by default, and then its last hidden states.

        ValueError for a layer that was not captured, DamagedStoreError for states that are not what was written.
        """
        ids = self._cache.layer_ids if layers is None else layers
        span, columns = slice(0, int(self._cache.lengths[sample])), (LAYERS, LAST)
        batch = self._cache.read([sample], columns=columns, layers=layers, positions=span, layout="stacked")
        measured = [measure(layer_id, states) for layer_id, states in zip(ids, batch[LAYERS][0], strict=True)]
        return [*measured, measure(None, batch[LAST][0])]


def read_tokens(cache: Cache, sample: int) -> SampleTokens:
    """Read the tokens of a sample of a store whose tokens are final; DamagedStoreError as for `SampleReader.tokens`."""
    batch = cache.read([sample], columns=(IDS, MASK), positions=slice(0, int(cache.lengths[sample])))
    ids, mask = batch[IDS][0].numpy().astype(np.int32), batch[MASK][0].numpy().astype(np.uint8)
    check_foreign_tokens(cache, sample, ids, mask)
    return SampleTokens(sample, ids, mask)


def check_foreign_tokens(cache: Cache, sample: int, ids: np.ndarray, mask: np.ndarray) -> None:
    """Raise DamagedStoreError unless the valid tokens of a sample are those that `index/digest` promises.

    Nothing else proves tokens that another tool has encoded anew: what they are read from may be any file.
    """
    if not {IDS, MASK} & cache.foreign_columns:
        return
    if sample_digest(ids, mask) != cache.index.digest[sample].tobytes():
        raise DamagedStoreError(f"the tokens of sample {sample} are not those that index/digest promises")


def measure(layer_id: int | None, states: torch.Tensor) -> StateNorms:
    """Measure states (tokens, H) of any floating dtype, in float64."""
    values = states.double()
    finite = values.isfinite()
    whole = values[finite.all(dim=1)]
    norms = whole.norm(dim=1)
    some = (norms.mean(), norms.min(), norms.max(), whole.min(), whole.max()) if whole.numel() else (math.nan,) * 5
    mean, least, most, lowest, highest = map(float, some)
    return StateNorms(layer_id, mean, least, most, lowest, highest, int((~finite).sum()))


def _samples_so_far(storage: Storage, shard_size: int) -> int:
    """Return the samples of the shards that stand in the token ledger without a hole from the first one on."""
    ledger = token_ledger(storage)
    whole = [number for number, shard in enumerate(ledger.committed()) if number == shard]
    if not whole:
        return 0
    rows = int(ledger.row(whole[-1])[TOKEN_OBJECTS.index(SOURCE_CURSOR), 1])
    return whole[-1] * shard_size + min(rows, shard_size)


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """A tokenizer, or None, and what a user should know about it, empty when nothing."""

    tokenizer: PreTrainedTokenizerBase | None
    note: str = ""


def find_tokenizer(manifest: Manifest, given: str | None = None) -> FoundTokenizer:
    """Load the tokenizer of the model ``given``, else that of the store's target if it is on this machine.

    A hub id of the manifest is looked for in the local cache alone, at the revision that was recorded. ValueError when
    what is ``given`` cannot be loaded.
    """
    from dspark_store.target.load import load_tokenizer

    if given is not None:
        tokenizer = load_tokenizer(TargetSource(given))
        recorded = manifest.get("tokenizer_sha256")
        same = recorded is None or recorded == tokenizer_sha256(tokenizer)
        return FoundTokenizer(tokenizer, "" if same else f"{given} has not the tokenizer that the store was made with")
    model = manifest.get("target_model")
    if not isinstance(model, str) or not model:
        return FoundTokenizer(None, "the store names no target; give its tokenizer with --tokenizer")
    try:
        directory = _local(model, manifest.get("target_revision"))
        return FoundTokenizer(load_tokenizer(TargetSource(directory)))
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        return FoundTokenizer(None, f"tokens are shown as ids, give --tokenizer for text: {reason}")


def _local(model: str, revision: object) -> str:
    """Return the path of a model on this machine; OSError when it is a hub id that is not in the local cache."""
    location = locate(TargetSource(model))
    if location.directory is not None:
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = revision if isinstance(revision, str) and revision else None
    try:
        return snapshot_download(model, revision=wanted, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError) as error:
        raise OSError(f"model {model!r} is neither a path nor in the local cache") from error
