"""What the values of a store are like: one pass over it, as JSON and as a page."""
