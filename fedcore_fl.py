"""The guard against another distribution that brings a package ``fedcore``, too, and the start of the command.

The public index has such a one: ``fedcore``, for the compression of models. Installed next to ours, ``fedcore-fl``, it
writes into the same folder, and the later one wins file by file. Hence this module stands outside the folder, where
the other one has no file. The line in ``fedcore_fl.pth`` calls :func:`find` at the first ``import fedcore`` of a
process; without it, nothing of ours would run where the other ``fedcore/__init__.py`` has replaced ours.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder


def find() -> ModuleSpec | None:
    """Return where Python finds ``fedcore``; None if it does not.

    :raises ImportError: another distribution ``fedcore`` lies next to it. The message has the commands that mend it.
    """
    spec = PathFinder.find_spec("fedcore")
    if spec is not None and spec.origin is not None:
        site = os.path.dirname(os.path.dirname(spec.origin))
        for name in os.listdir(site):  # in less time than importlib.metadata takes to be imported
            if name.startswith("fedcore-") and name.endswith((".dist-info", ".egg-info")):
                raise ImportError(_message(site, name.removeprefix("fedcore-").rpartition(".")[0]))
    return spec


def _message(site: str, version: str) -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    ours = f"-e {here}" if os.path.exists(os.path.join(here, "pyproject.toml")) else "fedcore-fl"
    return (
        f"{site} has the distribution fedcore {version}, which is another project's: its package is called fedcore as "
        "this framework's (fedcore-fl) is, and replaces files of it. These commands remove both, and install this "
        f"framework again:\n\n    pip uninstall --yes fedcore fedcore-fl\n    pip install {ours}\n"
    )


def main() -> None:
    """Run the command ``fedcore``.

    :raises SystemExit: always, with 2 where another distribution ``fedcore`` is in the way.
    """
    try:
        find()
    except ImportError as error:
        print(f"error: {error}", end="", file=sys.stderr)
        sys.exit(2)
    from fedcore.cli import main as command

    command()
