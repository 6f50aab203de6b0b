"""Reading a store: batches of samples by column, layer and position."""
