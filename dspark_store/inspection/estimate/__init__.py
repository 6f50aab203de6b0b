"""How large a store will be, and how long it takes: `forecast` first."""
