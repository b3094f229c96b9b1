"""Base: errors, value types, configuration, names and their entry points, random streams, child processes."""
