"""Engines run client tasks and stream back results; they know nothing of methods."""
