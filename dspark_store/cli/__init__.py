"""The commands of ``dspark-store``, a module each: its arguments, and what it prints."""
