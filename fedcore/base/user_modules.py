"""Import of the user's modules, for names such as ``module:script.Net``, without the runs that they start."""

from __future__ import annotations

import importlib
import sys
from contextvars import ContextVar
from typing import Any

from fedcore.base.errors import ConfigError


class RunWhileImported(ConfigError):
    """A module starts a run while a name makes fedcore import it."""


_importing: ContextVar[str | None] = ContextVar("importing", default=None)


def import_attribute(module: str, attribute: str) -> Any:
    """Import a module and return what a name in it stands for.

    :raises RunWhileImported: importing the module starts a run.
    """
    token = _importing.set(module)
    try:
        return getattr(importlib.import_module(module), attribute)
    finally:
        _importing.reset(token)


def refuse_while_importing() -> None:
    """Refuse to start a run where a name makes fedcore import the program that asks for it.

    :raises RunWhileImported: how the program can be imported.
    """
    module = _importing.get()
    if module is None:
        return
    frame, names = sys._getframe(1), []
    while frame.f_back is not None:
        if frame.f_code.co_name == "<module>":
            names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    program = next(iter(names), module)
    raise RunWhileImported(
        f"{program.rpartition('.')[2]}.py starts a run when it is imported; put fedcore.run below "
        'if __name__ == "__main__":'
    )
