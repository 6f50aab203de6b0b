"""What is in a store, whether it is true, and making it so again: what the commands stand on."""
