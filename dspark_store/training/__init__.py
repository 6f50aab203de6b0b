"""Training a draft, from a store or from a live target: the same code but for where the states come from."""
