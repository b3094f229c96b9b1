"""Tables of papers as recipes: their runs, the papers' figures and ours."""
