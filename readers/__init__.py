"""Reading a store: batches of samples by column, layer and position; and checking every object against its promises.

In: a store's path, rows or an epoch's order. Out: tensors; errors that name column, layer, sample, shard and object.
Read first `loader`, then follow a batch: `epoch` (which samples), `batch` (which requests), `plan` (which bytes),
`ranges` (the stage that reads them), `fetch` (the one that decodes).
`cache` is the store that a user opens, `verify` with `checks` looks at all of it.
docs/how.md walks the hops.
"""
