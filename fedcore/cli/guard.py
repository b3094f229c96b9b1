"""Turn every outcome of a command into one message and an exit code."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from fedcore.base.errors import DivergedError, FedcoreError
from fedcore.cli import output

BUG, BAD_INPUT, SOME_FAILED, DIVERGED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes of all commands; SOME_FAILED is for those that start several runs."""

ENVIRONMENT = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE),
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE),
    }
)
"""What file systems answer whatever the program does: permissions, names, limits, broken disks."""


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """Print a command's errors as messages; its ``debug`` argument adds the traceback.

    Exit codes: 2 for a FedcoreError and for what is the matter with a path, but 4 for a DivergedError; 130 for Ctrl-C,
    1 for a bug.
    """

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> None:
        debug = bool(options.get("debug"))
        if debug:
            os.environ["FEDCORE_DEBUG"] = "1"  # clients, in their own processes too, print their tracebacks
        try:
            function(*arguments, **options)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except BrokenPipeError:  # the reader, `head` for example, closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BUG) from None
        except KeyboardInterrupt:
            output.error("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except FedcoreError as error:
            _trace(debug)
            output.error(error)
            raise typer.Exit(DIVERGED if isinstance(error, DivergedError) else BAD_INPUT) from None
        except Exception as error:
            _trace(debug)
            if isinstance(error, OSError) and error.errno in ENVIRONMENT:
                output.error(f"{error.filename}: {error.strerror}" if error.filename else error)
                raise typer.Exit(BAD_INPUT) from None
            hint = "" if debug else "; run again with --debug for the traceback"
            output.error(f"{type(error).__name__}: {error}{hint}", label="internal error")
            raise typer.Exit(BUG) from None
        finally:
            os.environ.pop("FEDCORE_DEBUG", None)

    return command


def _trace(wanted: bool) -> None:
    if wanted:
        traceback.print_exc(file=sys.stderr)
