"""The command line: parses arguments, calls the Python API and prints the results.

No module here imports torch before a command needs it. ``--help`` thus answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

__all__ = ["command", "group", "main"]


def command(function: Callable[..., Any]) -> typer.Typer:
    """Return a function as a package's command, for its entry point of the group ``fedcore.commands``."""
    app = _app()
    app.command()(function)
    return app


def group(help: str) -> typer.Typer:
    """Return an empty group of commands, for ``@app.command("list")``. Other packages add to it by entry points."""
    from fedcore.cli.app import Commands

    return _app(cls=Commands, help=help, no_args_is_help=True)


def _app(**more: Any) -> typer.Typer:
    import typer

    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", **more)


def main() -> None:
    """Run the ``fedcore`` command.

    :raises SystemExit: always, with an exit code of ``fedcore.cli.guard``.
    """
    import io
    import os
    import sys

    from fedcore.base.process import end_without_collecting, keep_freed_memory

    end_without_collecting()
    keep_freed_memory()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads: a fork would end them, and start them again
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of 8 bits has no "…", and not every letter of a path
    try:
        from fedcore.cli.app import app

        app(prog_name="fedcore")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # rich and typer turn it into exit code 1
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python flushes both at its end
            os.dup2(nowhere, stream.fileno())
        sys.exit(141)  # the exit code of a program that SIGPIPE ends
