"""The main job: run the target once over a source of tokens, and write its states as a store.

In come the settings of a job (`settings`): a target, a source, a place. `job` plans it without loading a weight,
`tokenise` makes its tokens, `capture` runs batches and hands their states to the writers, `recompute` does so again
to compare. Out comes a committed shard at a time, and at the end a complete store. Ranks meet in `rendezvous`, agree by
`ranks` and `crew`, and end together by `watch` and `peers`. `engine` and `pushed` take states from an engine of the
user's instead. Read `run` first, then `fill`.
"""
