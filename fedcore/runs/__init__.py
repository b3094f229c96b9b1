"""One run: resolve, start, train round by round, evaluate, record, checkpoint, finish, resume."""
