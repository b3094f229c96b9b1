"""A tracker's module whose import fails."""

raise RuntimeError("boom in import")
