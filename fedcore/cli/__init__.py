"""The command line: parses arguments, calls the Python API and prints the results.

Nothing here imports torch before a command needs it, so that ``--help`` and ``plugins list`` answer at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the ``fedcore`` command; exits by SystemExit with an exit code of ``fedcore.cli.guard``."""
    import sys

    from fedcore.base.startup import end_without_collecting, keep_freed_memory, open_standard_streams

    open_standard_streams()
    end_without_collecting()
    keep_freed_memory()
    try:
        from fedcore.cli.app import app

        app(prog_name="fedcore")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
