"""A module for names only: classes that a test made are offered here, so that a config can name them."""
