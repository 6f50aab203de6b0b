"""Putting a damaged store right."""
