"""Is a store one that this training can use? Its manifest against what the run says and what the target is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.manifest import Manifest
from dspark_store.target.source import TargetSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run expects of a store; None where it does not say. ``target_model`` is a name, which only warns.

    ``num_hidden_layers`` counts the layers of the whole target.
    """

    target_model: str | None = None
    target_model_type: str | None = None
    target_vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    seq_length: int | None = None
    layers: Sequence[int] | None = None

    @classmethod
    def of_target(
        cls, target: TargetSource, *, seq_length: int | None = None, layers: Sequence[int] | None = None
    ) -> Expected:
        """Read what a target's text configuration says, as a precompute writes it down. ValueError when it has none."""
        from dspark_store.target.load import load_target_config, text_config

        text = text_config(load_target_config(target))
        return cls(
            target_model=target.model,
            target_model_type=str(text.model_type),
            target_vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            num_hidden_layers=int(text.num_hidden_layers),
            seq_length=seq_length,
            layers=layers,
        )


_COMPARED = ("target_model_type", "target_vocab_size", "hidden_size", "num_hidden_layers", "seq_length")
_NEEDED = (*_COMPARED, "dtype", "target_hidden_dim", "target_last_hidden_dim", "target_layer_ids")


def check_manifest(manifest: Manifest, expected: Expected) -> None:
    """Raise ValueError naming the first field in which a store is not what the run expects, or that it lacks.

    NeMo Automodel's checks, in its order, but for three: states of any dtype train on any device, since they are cast
    anyway; the run's layers may be a subset of the captured ones; and of a target that was cut to its first layers the
    whole depth is compared. Another name of the target is but a warning: paths differ between machines.
    """
    missing = [name for name in _NEEDED if manifest.get(name) is None]
    if missing:
        raise ValueError(
            f"the store's manifest has no {missing[0]}: it was written without one, and cannot be trained from"
        )
    if expected.target_model not in (None, manifest.get("target_model")):
        _log.warning(
            "the store was made from the target %r, this run names %r",
            manifest.get("target_model"),
            expected.target_model,
        )
    whole = manifest.get("target_num_hidden_layers_full")
    stored = manifest if whole is None else {**manifest, "num_hidden_layers": whole}
    for name in _COMPARED:
        _compare(name, stored[name], getattr(expected, name))
    if manifest["dtype"] not in CACHE_DTYPES:
        raise ValueError(f"dtype {manifest['dtype']!r} of the store is unknown; expected {', '.join(CACHE_DTYPES)}")
    captured, width = manifest["target_layer_ids"], manifest["hidden_size"]
    if not isinstance(captured, list) or not isinstance(width, int):
        raise ValueError(f"target_layer_ids of the store is {captured!r}: expected a list of whole numbers")
    _compare("target_hidden_dim", manifest["target_hidden_dim"], width * len(captured))
    _compare("target_last_hidden_dim", manifest["target_last_hidden_dim"], width)
    absent = [layer for layer in expected.layers or () if layer not in captured]
    if absent:
        raise ValueError(f"target_layer_ids of the store are {captured}: layer {absent[0]} was not captured")


def _compare(name: str, stored: object, wanted: object) -> None:
    if wanted is not None and stored != wanted:
        raise ValueError(f"{name} of the store is {stored!r}, this run expects {wanted!r}: use another store")
