"""The frozen model: how it is loaded and shared out over ranks, which layers are captured, what is taken from it.

In: the name of a model, a plan of ranks, batches of ids. Out: hidden states of chosen layers, the vocabulary tables,
the identity of the weights.
Read `capture` first: one forward, watched by hooks. `batches` makes what it runs, `load` the model. `parallel` plans
how ranks share it, `sharded` is the part that one rank holds, by `axes` and `pipeline`.
"""
