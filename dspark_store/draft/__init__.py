"""The draft: a small model that proposes a block of tokens from a frozen target's states, and how it learns.

In: ids and loss mask (B, S), the states of the captured layers (B, S, L * H) and the last hidden states (B, S, H).
Out: the loss of a micro-batch and the counts that a draft is judged by.
Read `model` first; `settings` has its sizes, `anchors` says which slots there are and what each predicts, `backbone`
and `heads` are its layers, `loss` what is made of its output.
"""
