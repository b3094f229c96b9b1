"""Runs side by side: read, grouped by settings, summarised over seeds, written as tables. Imports no torch."""
