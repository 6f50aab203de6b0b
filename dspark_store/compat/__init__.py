"""NeMo Automodel's interface and its YAML, on the public API like any other user; no room below imports it."""
