"""What the values of a store are like: one pass (`survey`) over it, as JSON (`report`) and as a `page`."""
