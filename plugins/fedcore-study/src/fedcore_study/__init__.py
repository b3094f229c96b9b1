"""Studies of many fedcore runs: sweep, compare, report, reproduce, bench."""
