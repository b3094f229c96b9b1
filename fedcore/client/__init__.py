"""One client: its session, the single loop over local epochs and batches, what plugins see of it, its answers."""
