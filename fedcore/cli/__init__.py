"""The command line: parses, calls the public Python API, draws what comes back. It has no logic of its own.

Nothing here imports torch before a command needs it, so that ``--help`` and ``plugins list`` answer at once.
"""

from __future__ import annotations


def main() -> None:
    """Run the ``fedcore`` command; leaves by SystemExit with an exit code of ``fedcore.cli.guard``."""
    import sys

    try:
        from fedcore.cli.app import app

        app(prog_name="fedcore")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
