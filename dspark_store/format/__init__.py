"""What is on disk. Knows no model, no source of tokens and no command; docs/format.md is its specification."""
