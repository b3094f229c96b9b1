"""One client: its runtime and sessions, the single loop over local epochs and batches, its messages."""
