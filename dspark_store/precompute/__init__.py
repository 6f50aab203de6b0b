"""The main job: run the target once over a source of tokens, and write its states as a store."""

from dspark_store.precompute.config import PrecomputeConfig
from dspark_store.precompute.run import run

__all__ = ["PrecomputeConfig", "run"]
