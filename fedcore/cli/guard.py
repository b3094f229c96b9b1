"""Turn every outcome of a command, whatever package it is of, into one message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from fedcore.base.config import RunConfig
from fedcore.base.errors import DEBUG, DivergedError, FedcoreError, PluginCallError, RoundFailedError, nearest
from fedcore.cli import output

BUG, BAD_INPUT, SOME_FAILED, DIVERGED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes of all commands; SOME_FAILED is for those that start several runs."""

_DEBUG = "fedcore.debug"


@contextmanager
def guarded(context: typer.Context) -> Iterator[None]:
    """Print the errors of the command that the block runs as messages; with its ``--debug`` the tracebacks, too.

    Exit codes: 2 for a FedcoreError and for what the operating system refuses, such as a path or a full disk; 4 for a
    DivergedError; 130 for Ctrl-C; 141 where the reader of the output closed the pipe; 1 for a bug, a plugin's included.
    What has an exit code already is typer's: a mistake in the arguments, or a command's own end.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for example, closed the pipe: fedcore.cli.main ends quietly
        raise
    except KeyboardInterrupt:
        output.error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except FedcoreError as error:
        _trace(context)
        raised = isinstance(error, PluginCallError) or (isinstance(error, RoundFailedError) and error.raised)
        output.error(str(error).removesuffix(".") + _hint(context) if raised else error)
        raise typer.Exit(DIVERGED if isinstance(error, DivergedError) else BUG if raised else BAD_INPUT) from None
    except Exception as error:
        if hasattr(error, "exit_code"):
            _suggest(error)
            raise
        _trace(context)
        if isinstance(error, OSError):
            output.error(f"{error.filename}: {error.strerror}" if error.filename else error)
            raise typer.Exit(BAD_INPUT) from None
        output.error(f"{type(error).__name__}: {error}{_hint(context)}", label="internal error")
        raise typer.Exit(BUG) from None
    finally:
        os.environ.pop(DEBUG, None)


def debug(context: typer.Context, wanted: bool) -> bool:
    """Note that a command has ``--debug``; clients, in their own processes too, print their tracebacks then."""
    if wanted:
        context.meta[_DEBUG] = True
        os.environ[DEBUG] = "1"
    return wanted


def _suggest(error: Any) -> None:
    """Add the option of a run that an unknown flag resembles, where typer finds nothing near to it."""
    if not getattr(error, "possibilities", True):
        near = nearest(error.option_name.strip("-"), RunConfig.model_fields)
        error.possibilities = near and ["--" + near.replace("_", "-")]


def _hint(context: typer.Context) -> str:
    return "" if _DEBUG in context.meta else "; run again with --debug for the traceback"


def _trace(context: typer.Context) -> None:
    if _DEBUG in context.meta:
        traceback.print_exc(file=sys.stderr)
