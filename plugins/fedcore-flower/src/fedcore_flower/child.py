"""A process that ends with its parent: ``python -m fedcore_flower.child PARENT SIGNAL MODULE:FUNCTION ARGUMENT ...``.

Linux sends SIGNAL to the process when its parent ends, even if the parent is killed. The arguments are the function's
command line.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask the kernel for the signal, and call the function."""
    parent, signal_number, target, *rest = arguments
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != int(parent):
        sys.exit(1)  # the parent ended before this process asked for the signal
    module, _, function = target.partition(":")
    sys.argv = [target, *rest]
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main(sys.argv[1:])
