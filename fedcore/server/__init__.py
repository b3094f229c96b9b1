"""One round on the server: cohort, exchange, validation of updates, aggregation, commit."""
