"""Turn every outcome of a command, of the core or of a package, into one message and an exit code."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from fedcore.base import output, registry
from fedcore.base.config import RunConfig
from fedcore.base.errors import (
    DEBUG,
    DivergedError,
    FedcoreError,
    PluginCallError,
    RoundFailedError,
    flag_of,
    nearest,
    print_traceback,
)

BUG, BAD_INPUT, SOME_FAILED, DIVERGED, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes of all commands. SOME_FAILED is for commands that start several runs."""


@contextmanager
def guarded() -> Iterator[None]:
    """Print the errors of the command in the block as messages. With ``--debug``, also print the tracebacks.

    Exit codes:

    - 1: a bug: code of fedcore or of a plugin raised;
    - 2: a FedcoreError, such as that of a plugin that breaks its contract, or a refusal of the operating system, such
      as a missing path or a full disk. A refusal has an error number; an OSError without one, for a descriptor that is
      not open, or for a pipe that another process closed, is a bug;
    - 4: a DivergedError;
    - 130: Ctrl-C;
    - 141: the reader of the output, ``head`` for example, closed the pipe. Other broken pipes are bugs.

    An exception with an exit code comes from typer and passes: a mistake in the arguments, or a command's own end.
    """
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        output.error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except FedcoreError as error:
        print_traceback()
        raised = isinstance(error, PluginCallError) or (isinstance(error, RoundFailedError) and error.raised)
        output.error(str(error).removesuffix(".") + _hint() if raised else error)
        raise typer.Exit(DIVERGED if isinstance(error, DivergedError) else BUG if raised else BAD_INPUT) from None
    except Exception as error:
        if hasattr(error, "exit_code"):
            _suggest(error)
            raise
        if isinstance(error, BrokenPipeError) and _unread():
            raise  # fedcore.cli.main ends quietly
        print_traceback()
        if isinstance(error, OSError) and error.errno not in (None, errno.EBADF, errno.EPIPE):
            output.error(f"{error.filename}: {error.strerror}" if error.filename else error)
            raise typer.Exit(BAD_INPUT) from None
        output.error(f"{type(error).__name__}: {error}{_hint()}", label="internal error")
        raise typer.Exit(BUG) from None
    finally:
        os.environ.pop(DEBUG, None)


def _unread() -> bool:
    """Return whether the reader of stdout or of stderr is gone."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)  # what is reported unasked: errors
    return bool(streams.poll(0))


def debug(wanted: bool) -> bool:
    """Note that a command has ``--debug``. Clients then print their tracebacks, in worker processes as well."""
    if wanted:
        os.environ[DEBUG] = "1"
    return wanted


def _suggest(error: Any) -> None:
    """Say what an unknown flag can mean: an option of a new run, or the option that it resembles if typer has none."""
    if not hasattr(error, "possibilities"):
        return
    flag = error.option_name
    if flag in map(flag_of, RunConfig.model_fields):
        meant = "--set ENGINE.OPTION=VALUE" if flag == flag_of("engine_options") else flag
        error.message, error.possibilities = f"No such option: {flag}. A new run has it: fedcore train {meant}", []
    elif package := registry.package_of("option", flag.removeprefix("--").removeprefix("no-").replace("-", "_")):
        error.message, error.possibilities = f"No such option: {flag}. {registry.is_in(flag, package)}", []
    elif not error.possibilities:
        near = nearest(flag.strip("-"), RunConfig.model_fields)
        known = {known for parameter in error.ctx.command.params for known in parameter.opts}
        error.possibilities = [flag_of(near)] if near and flag_of(near) in known else []


def _hint() -> str:
    return "" if DEBUG in os.environ else "; run again with --debug for the traceback"
