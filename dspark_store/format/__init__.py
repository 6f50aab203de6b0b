"""What is on disk. Knows no model, no source of tokens and no command; docs/format.md is its specification.

In: arrays, labels and attributes. Out: objects that prove what they are, ledgers, token shards, the metadata tree.
Read first `shard` (one object), then `ledger` (what commits a shard) and `schema` (which arrays a store has). Then
`objects` opens an object as what it ought to be, `manifest` and `metadata` are the root and the seal over it, `storage`
and `files` say where bytes live and when they are durable.
"""
