"""A store summed up in a moment, without its states."""
