"""Processes of runs without the cost of an import each: a template forks them, see :mod:`fedcore_workers.forks`.

Every run still has a process of its own: a crash takes no other run with it, and a run finds the same state as in
``fedcore train``. Where there is no template, each run's process starts anew.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedcore.tools import process
from fedcore_workers import TEMPLATE, ForkedProcess, Template, template

CHILD = "fedcore_study.sweeps.child"
"""The module whose ``main`` a run's process calls."""


class Starter:
    """Starts the processes of runs. :func:`starting` makes one."""

    def __init__(self, forks: Template | None) -> None:
        self._forks, self._environment = forks, process.environment(**TEMPLATE)

    def __call__(self, arguments: Sequence[str], log: int) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start a run's process.

        :param arguments: of ``CHILD``'s ``main``.
        :param log: the file for what the process prints on stderr.
        """
        if self._forks is None:
            return subprocess.Popen(  # noqa: S603 - our own module, arguments of our own making
                process.python_command(CHILD, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is the sweep's business
                env=self._environment,
            )
        stdin, ours = os.pipe()
        theirs, stdout = os.pipe()
        opened = {0: stdin, 1: stdout, 2: log}
        forked = self._forks.fork(f"{CHILD}:main", [list(arguments)], environment=self._environment, descriptors=opened)
        os.close(stdin)
        os.close(stdout)
        forked.stdin, forked.stdout = os.fdopen(ours, "wb"), os.fdopen(theirs, "rb")
        return forked


@contextmanager
def starting() -> Iterator[Starter]:
    """Return a block with what starts runs' processes. The template begins to import at once."""
    with template("fedcore.runs.api", CHILD, outlived=True) as forks:
        yield Starter(forks)
