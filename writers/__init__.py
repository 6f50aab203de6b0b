"""Writing a store: tokens, states, target weights, and the publishing of a finished store.

Every object has one writer and is written whole; what a crash leaves behind is committed shards and files that
`sweep_uncommitted` removes.
"""

from dspark_store.writers.lock import StoreLock
from dspark_store.writers.pipeline import EncodePipeline
from dspark_store.writers.publish import complete_store, settle_tokens
from dspark_store.writers.recovery import sweep_finished, sweep_uncommitted
from dspark_store.writers.states import StateShardWriter
from dspark_store.writers.tokens import TokenRows, read_token_shard, write_token_shard
from dspark_store.writers.weights import write_weights

__all__ = [
    "EncodePipeline",
    "StateShardWriter",
    "StoreLock",
    "TokenRows",
    "complete_store",
    "read_token_shard",
    "settle_tokens",
    "sweep_finished",
    "sweep_uncommitted",
    "write_token_shard",
    "write_weights",
]
