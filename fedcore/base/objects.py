"""Objects that a Python program gives to a run in place of names: what they are called, and where they are found.

While a run has such objects they are *lent* to the registry, which finds them by kind and name. A worker process
defines them again from the source that :mod:`fedcore.base.definitions` extracts. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcore.base.errors import ConfigError

OBJECT = "object:"
"""How the name of an object starts that no other program can import."""

CODE = "module:"
"""How a name starts that is imported: ``module:package.module.attribute``."""

DEFINED = "fedcore_given"
"""The module in which a worker process defines given objects."""

Key = tuple[str, str]
"""Kind, such as ``model``, and name."""


@dataclass(frozen=True)
class Definitions:
    """How another process makes given objects: the source that defines them, and under which name each stands in it."""

    source: str = ""
    attributes: Mapping[Key, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return {"source": self.source, "attributes": [[*key, name] for key, name in self.attributes.items()]}


_lent: dict[Key, Any] = {}
_definitions: list[Definitions] = []


@contextmanager
def lent(objects: Mapping[Key, Any], definitions: Definitions | None = None) -> Iterator[None]:
    """Let the registry find objects until the block ends."""
    before = dict(_lent)
    _lent.update(objects)
    _definitions.append(definitions or Definitions())
    try:
        yield
    finally:
        _lent.clear()
        _lent.update(before)
        _definitions.pop()


def find(kind: str, name: str) -> Any | None:
    """Return a lent object; None where there is none of this name.

    :raises ConfigError: the name is that of an object that has to be given again.
    """
    found = _lent.get((kind, name))
    if found is None and name.startswith(OBJECT):
        argument = "plugins=[...]" if kind == "plugin" else f"{kind}=..."
        raise ConfigError(
            f"{kind} {name!r} is an object that a Python program gave to its run; only Python can give it again: "
            f"fedcore.resume(path, {argument}), likewise evaluate_run and load_run"
        )
    return found


def is_lent(name: str) -> bool:
    """Whether a name, of any kind, is that of a lent object."""
    return any(name == other for _, other in _lent)


def current() -> Definitions:
    """Return the definitions of the objects that are lent, for another process."""
    return _definitions[-1] if _definitions else Definitions()


def define(plain: Mapping[str, Any]) -> None:
    """Define the objects of another process in this one, and lend them until it ends.

    :raises ConfigError: their source cannot be executed here.
    """
    if not plain["source"]:
        return
    module = ModuleType(DEFINED)
    file = f"<{DEFINED}>"
    linecache.cache[file] = (len(plain["source"]), None, plain["source"].splitlines(keepends=True), file)
    sys.modules[DEFINED] = module
    try:
        exec(compile(plain["source"], file, "exec"), module.__dict__)  # noqa: S102 - the caller's own program
    except Exception as error:  # a program can raise anything
        raise ConfigError(
            f"a worker process cannot define the objects that were given to the run ({type(error).__name__}: {error}). "
            "Put them into a module, or use workers=0"
        ) from error
    _lent.update({(kind, name): getattr(module, attribute) for kind, name, attribute in plain["attributes"]})


def import_name(value: Any) -> str | None:
    """Return the name under which any process imports a function or class; None where none can."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not value:
        return None
    if module.__name__ != "__main__":
        return f"{CODE}{module.__name__}.{name}" if module.__spec__ is not None else None
    stem = main_module(module)
    return f"{CODE}{stem}.{name}" if stem else None


def main_module(main: ModuleType) -> str | None:
    """Return the name under which the program that runs can be imported; None for a notebook, for example."""
    if main.__spec__ is not None:
        return main.__spec__.name  # python -m
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).stem.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(Path(file).stem)
    except (ImportError, ValueError):
        return None
    found = spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()
    return Path(file).stem if found else None


def object_name(value: Any) -> str:
    """Return a name for an object that no other process can import."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return OBJECT + "".join(letter for letter in name if letter.isalnum() or letter in "_-")
