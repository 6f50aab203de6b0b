"""The tokenizer that a store's tokens are of, as far as it can be had without the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_store.format.manifest import Manifest
from dspark_store.sources.identity import tokenizer_sha256
from dspark_store.target.source import TargetSource, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
