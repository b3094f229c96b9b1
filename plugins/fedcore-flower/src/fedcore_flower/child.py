"""A process that ends with its parent: ``python -m fedcore_flower.child PARENT SIGNAL TARGET ARGUMENT ...``.

TARGET is ``MODULE:FUNCTION`` or the name of an installed command, such as ``flower-superexec``. The arguments are its
command line. Linux sends SIGNAL to the process when its parent ends, even if the parent is killed.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from fedcore_workers import die_with_parent


def main(arguments: list[str]) -> None:
    """Ask the kernel for the signal, and run the target."""
    parent, signal_number, target, *rest = arguments
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(int(parent), by=int(signal_number))
    module, colon, function = target.partition(":")
    sys.argv = [target, *rest]
    (getattr(importlib.import_module(module), function) if colon else installed_command(target))()


def installed_command(name: str) -> Callable[[], Any]:
    """Return the function behind a command that a package installs."""
    function: Callable[[], Any] = entry_points(group="console_scripts")[name].load()
    return function


if __name__ == "__main__":
    main(sys.argv[1:])
