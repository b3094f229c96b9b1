"""Storage: a plugin's state and the clients' states, files that are whole or absent, tensors and JSON as bytes."""
