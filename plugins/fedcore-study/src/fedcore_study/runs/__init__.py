"""Looking back at runs: find them, show, compare, label and delete them. Imports no torch."""
