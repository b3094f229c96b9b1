"""The command line: parses arguments, calls the Python API and prints the results.

No module here imports torch before a command needs it. ``--help`` thus answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

__all__ = ["command", "group", "main"]


def command(function: Callable[..., Any], **more: Any) -> typer.Typer:
    """Return a function as a package's command, for its entry point of the group ``fedcore.commands``.

    :param more: parameters of typer's ``command``.
    """
    app = _app()
    app.command(**more)(function)
    return app


def group(help: str, **more: Any) -> typer.Typer:
    """Return an empty group of commands, for ``@app.command("list")``. Other packages add to it by entry points.

    :param more: other parameters of ``typer.Typer``.
    """
    from fedcore.cli.app import Commands

    return _app(cls=Commands, help=help, no_args_is_help=True, **more)


def _app(*, add_completion: bool = False, **more: Any) -> typer.Typer:
    import typer

    return typer.Typer(add_completion=add_completion, pretty_exceptions_enable=False, rich_markup_mode="rich", **more)


def main() -> None:
    """Run the ``fedcore`` command.

    :raises SystemExit: always, with an exit code of ``fedcore.cli.guard``.
    """
    import io
    import os
    import sys

    from fedcore.base.errors import FedcoreError
    from fedcore.base.process import end_without_collecting, keep_freed_memory

    for name in ("stdin", "stdout", "stderr"):  # of a closed one, the next file that is opened would take the place
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # by processes that this one starts
            setattr(sys, name, os.fdopen(nowhere, "r+", encoding="utf-8"))
    end_without_collecting()
    keep_freed_memory()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads: a fork would end them, and start them again
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of 8 bits has no "…", and not every letter of a path
    try:
        from fedcore.cli.app import app

        app(prog_name="fedcore")
    except (KeyboardInterrupt, OSError, FedcoreError) as stop:  # --help prints before a command has its guard
        interrupted = isinstance(stop, KeyboardInterrupt)
        print("interrupted" if interrupted else f"error: {stop}", file=sys.stderr)
        sys.exit(130 if interrupted else 2)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # rich and typer turn it into exit code 1
            raise
        sys.stdout = sys.stderr = None  # Python would flush both at its end
        sys.exit(141)  # the exit code of a program that SIGPIPE ends
