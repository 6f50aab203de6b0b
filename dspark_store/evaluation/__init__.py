"""Judging a trained draft by what it is for: tokens per step of the real target.

In: a target, a draft, prompts. Out: tokens, steps, and whether the text is the target's own.
Read `decoder` first: blocks that the draft proposes and the target checks. `sampling` says which tokens are kept,
`trial` runs the whole of it by `settings`, and sums it up over prompts.
"""
