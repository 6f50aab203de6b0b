"""The frozen model: which layers are captured, how it is loaded, what is taken from it."""
