"""How fast the engine is, as ratios to a reference loop timed in the same run."""
