"""Measurements of dspark-store and the demo: programs run from a checkout, not part of the installed package."""
