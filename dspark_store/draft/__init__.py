"""The draft: a small model that proposes a block of tokens from a frozen target's states, and how it learns."""
