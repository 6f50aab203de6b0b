"""Putting a damaged store right: `plan` first, then `state`, which the other modules change in an `overlay`."""
