"""What the values of a store are like: one pass over it (`survey`, which gives JSON), and a `page`."""
