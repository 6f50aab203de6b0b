"""The two ledgers of a store, which whoever writes one shares: what is committed, and what is not."""

from __future__ import annotations

from dspark_store.format.ledger import Ledger
from dspark_store.format.schema import STATE_LEDGER, TOKEN_LEDGER, TOKEN_OBJECTS, StoreSchema
from dspark_store.format.storage import Storage


def token_ledger(storage: Storage) -> Ledger:
    """Return the ledger of the token phase."""
    return Ledger(storage, TOKEN_LEDGER, len(TOKEN_OBJECTS))


def state_ledger(storage: Storage, schema: StoreSchema) -> Ledger:
    """Return the ledger of the states phase."""
    return Ledger(storage, STATE_LEDGER, len(schema.state_objects))
