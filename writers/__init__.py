"""Writing a store: tokens, states, target weights, and the publishing of a finished store.

In: rows of tokens, captured states, the target's tables. Out: durable objects, and ledger rows that commit them.
Every object has one writer and is written whole; what a crash leaves behind is committed shards and files that
`recovery.sweep_uncommitted` removes. Read first `states`, then `pipeline` (threads) and `publish` (what ends a phase);
`lock` keeps a second job out. docs/how.md walks the hops.
"""
