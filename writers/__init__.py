"""Writing a store: tokens, states, target weights, and the publishing of a finished store.

Every object has one writer and is written whole; what a crash leaves behind is committed shards and files that
`recovery.sweep_uncommitted` removes.
"""
