"""A verified copy of a store under other settings."""
