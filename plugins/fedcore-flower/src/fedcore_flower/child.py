"""A process that ends with its parent: ``python -m fedcore_flower.child PARENT SIGNAL MODULE:FUNCTION ...``.

The kernel sends it SIGNAL when its parent dies, killed even. What follows are the function's own arguments.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Bind this process's life to its parent's, and become what was asked for."""
    parent, number, target, *rest = arguments
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != int(parent):
        sys.exit(1)  # it died before the kernel was told
    module, _, function = target.partition(":")
    sys.argv = [target, *rest]
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    main(sys.argv[1:])
