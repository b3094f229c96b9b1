"""Import of the user's modules, which names such as ``module:script.Net`` stand for, without the runs that they start.

A script that starts a run when it is imported has the part of it that defines things executed, as in a worker process.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcore.base.definitions import all_definitions
from fedcore.base.errors import ConfigError


class RunWhileImported(ConfigError):
    """A module starts a run while a name makes fedcore import it."""


@dataclass
class _Import:
    """An import that a name causes: the module, and the line of it that tried to start a run; None while none did."""

    module: str
    line: int | None = None


_importing: ContextVar[_Import | None] = ContextVar("importing", default=None)
_defined: set[str] = set()
"""The modules that have only what their source defines."""


def import_attribute(module: str, attribute: str) -> Any:
    """Import a module and return what a name in it stands for.

    One that starts a run while it is imported has only what its source defines.

    :raises RunWhileImported: that one's source does not define the name alone.
    """
    with _guarded(module) as found:
        try:
            return getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:  # a script can end in any way where its run did not start
            if module in _defined:
                raise RunWhileImported(
                    f"{_message(module)} ({attribute!r} is not defined without running it)"
                ) from error
            if found.line is None:
                raise
            _define(module, found.line)
    return import_attribute(module, attribute)


def refuse_while_importing() -> None:
    """Refuse to start a run where a name makes fedcore import the program that asks for it.

    :raises RunWhileImported: how the program can be imported.
    """
    found, frame, program = _importing.get(), sys._getframe(1), ""
    if found is None:
        return
    while frame.f_back is not None:
        if frame.f_code.co_name == "<module>":
            name = str(frame.f_globals.get("__name__"))
            program = program or name
            if name == found.module:
                found.line = found.line or frame.f_lineno
                break
        frame = frame.f_back
    raise RunWhileImported(_message(program or found.module))


def _message(module: str) -> str:
    file = f"{module.rpartition('.')[2]}.py"
    return f'{file} starts a run when it is imported; put fedcore.run below if __name__ == "__main__":'


@contextmanager
def _guarded(module: str) -> Iterator[_Import]:
    found = _Import(module)
    token = _importing.set(found)
    try:
        yield found
    finally:
        _importing.reset(token)


def _define(name: str, line: int) -> None:
    """Make a module of what a script defines, which other modules can import.

    :param line: where the script starts its first run.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RunWhileImported(_message(name))
    try:
        text = all_definitions(Path(spec.origin).read_text(encoding="utf-8"), line)
    except (OSError, ValueError, SyntaxError) as error:
        raise RunWhileImported(f"{_message(name)} ({error})") from error
    module, file = importlib.util.module_from_spec(spec), f"<definitions of {spec.origin}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec"), module.__dict__)  # noqa: S102 - the user's own program
    except BaseException:
        del sys.modules[name]
        raise
    _defined.add(name)
