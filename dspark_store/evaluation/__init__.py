"""Judging a trained draft by what it is for: tokens a step of the real target."""
