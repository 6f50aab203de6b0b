"""The checks that verification consists of, each of one kind of object. None raises: they report, and go on.

In: a store under examination, `findings.StoreView`. Out: a `Problem` per object that is not as it was written.
Read first `findings`.
"""
