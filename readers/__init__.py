"""Reading a store: batches of samples by column, layer and position."""

from dspark_store.readers.cache import Cache, open_cache
from dspark_store.readers.loader import CacheLoader
from dspark_store.readers.verify import Problem, verify_store
from dspark_store.readers.weights import TargetWeights, read_weights

__all__ = ["Cache", "CacheLoader", "Problem", "TargetWeights", "open_cache", "read_weights", "verify_store"]
