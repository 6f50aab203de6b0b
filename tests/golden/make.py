"""Makes the golden stores of format versions 1 and 2: ``python -m tests.golden.make DIRECTORY``.

The committed ones were made once and are never made again: what they hold is what a version means.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark_store.format.int8 import AIMS
from tests.stores import BuiltStore, Shape, bits, build_store

LENGTHS = (12, 1, 9)
SHAPE = Shape(seq_length=12, shard_size=2, chunk_tokens=8, hidden_size=4, layer_ids=(1, -1, 3), vocab=6)
FIELDS: dict[str, Any] = {
    "manifest": {
        "target_model": "a/model",
        "target_model_type": "llama",
        "dtype": "set by each store",
        "seq_length": 12,
        "shard_size": 2,
        "target_layer_ids": [1, -1, 3],
        "train_data_path": "données.jsonl",
        "train_split": None,
        "shuffle_seed": 42,
        "mask_reasoning_content": False,
        "pad_token_id": 5,
    },
    "target_config": {"hidden_size": 4, "num_hidden_layers": 4, "rms_norm_eps": 1e-06},
    "head": {"logit_softcap": 30.0, "embedding_scale": 2.0},
    "producers": ({"versions": {"torch": "2.9.0"}, "world": 1},),
}


@dataclass(frozen=True)
class Golden:
    """One golden store: its name, and how it is made."""

    name: str
    dtype: str
    codec: str
    tied: bool

    @property
    def place(self) -> Path:
        """The folder of its format version."""
        return Path(__file__).with_name("v2" if self.dtype in AIMS else "v1")

    def make(self, directory: Path) -> BuiltStore:
        """Write the store, and beside it what it holds."""
        stored = {"dtype": "bf16", "state_dtype": self.dtype} if self.dtype in AIMS else {"dtype": self.dtype}
        fields = {**FIELDS, "manifest": {**FIELDS["manifest"], **stored}}
        store = build_store(
            directory / self.name,
            dtype=self.dtype,
            codec=self.codec,
            lengths=LENGTHS,
            shape=SHAPE,
            tied=self.tied,
            spoiled=2,
            fields=fields,
        )
        arrays: dict[str, Any] = {**contents(store)}  # numpy 2.0 has no option allow_pickle, and would store it
        np.savez(directory / f"{self.name}.npz", **arrays)
        facts = {"manifest": store.record.manifest, "store_id": store.record.store_id, "status": [0, 0, 1]}
        text = json.dumps(facts, indent=2, ensure_ascii=False, sort_keys=True)
        (directory / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        return store


GOLDEN = (
    Golden("bf16-default", "bf16", "default", tied=False),
    Golden("fp32-none", "fp32", "none", tied=True),
    Golden("int8-default", "int8", "default", tied=True),
)


def contents(store: BuiltStore) -> dict[str, Any]:
    """Return what a store holds, states as bits: rows one behind the other, without padding."""
    samples = store.samples
    return {
        "lengths": np.array([len(sample.ids) for sample in samples]),
        "ids": np.concatenate([sample.ids for sample in samples]),
        "mask": np.concatenate([sample.mask for sample in samples]),
        "layers": np.concatenate([bits(sample.layers) for sample in samples], axis=1),
        "last": np.concatenate([bits(sample.last) for sample in samples]),
        "embed": bits(store.embed),
        "head": bits(store.head),
    }


if __name__ == "__main__":
    for golden in GOLDEN:
        golden.make(Path(sys.argv[1]))
