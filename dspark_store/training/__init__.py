"""Training a draft, from a store or from a live target: the same code but for where the states come from.

In: a `TrainConfig`, and a store or the file of a precompute. Out: checkpoints and metrics in the output directory.
Read `loop` first: epochs of batches, steps, validations, checkpoints. `data` opens the store and builds loaders and
draft, `learner` makes one step, `checkpoint` and `state` are what a training is resumed from, `journal` is the metrics,
`ranks` the processes of torchrun, `online` the live target.
"""
