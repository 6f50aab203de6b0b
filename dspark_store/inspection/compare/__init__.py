"""Two stores beside each other."""
