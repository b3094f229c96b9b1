"""Tables of papers as recipes: their runs, the figures they print, and ours beside them."""
