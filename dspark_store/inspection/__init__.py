"""What is in a store, whether it is true, and making it so again: what the commands stand on.

In comes a store, finished or growing; out come values that commands print or write as JSON, another store (`rechunk`),
or the same one put right (`repair`). What reads all states does so through `shardwise`, in threads or on a dask
cluster, with the same result. Read `summary` first (no state is read), then `stats.survey` (one pass over all states),
`compare`, `verification`, `repair.plan` (decides everything in an overlay before it writes) and `rechunk`.
`estimate.forecast` says how large a store will be.
"""
