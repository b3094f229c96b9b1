"""Grids of runs: what they are, their directory, their processes."""
