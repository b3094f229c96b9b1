"""Objects that a Python program gives to a run instead of names: their names, and where they are found.

During the run, these objects are *lent* to the registry. The registry finds them by kind and name. They reach the run's
own worker processes as bytes of cloudpickle, from process to process and never through a file. A class of a script or
notebook thus travels by value, as in Ray and joblib. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcore.base.errors import ConfigError

OBJECT = "object:"
"""Prefix of the name of an object that no other program can import."""

CODE = "module:"
"""Prefix of a name that is imported: ``module:package.module.attribute``."""

Key = tuple[str, str]
"""Kind, such as ``model``, and name."""

_lent: dict[Key, Any] = {}


@contextmanager
def lent(objects: Mapping[Key, Any]) -> Iterator[None]:
    """Let the registry find objects until the block ends."""
    before = dict(_lent)
    _lent.update(objects)
    try:
        yield
    finally:
        _lent.clear()
        _lent.update(before)


def find(kind: str, name: str) -> Any | None:
    """Return a lent object; None if no object with this name is lent.

    :raises ConfigError: the name belongs to an object of a Python program, which has to give the object again.
    """
    found = _lent.get((kind, name))
    if found is None and name.startswith(OBJECT):
        if kind == "partitioner":
            raise ConfigError(
                f"partition {name!r} was made by a Python program; give fedcore.run the partition again, or name the "
                "run's file: --partition RUN_DIR/partition.json"
            )
        argument = f"{kind}s=[...]" if kind in ("plugin", "metric") else f"{kind}=..."
        raise ConfigError(
            f"{kind} {name!r} is an object that a Python program gave to its run; give it again in Python: fedcore.run("
            f"config, {argument}) or fedcore.resume(path, {argument}); evaluate_run and load_run take it, too"
        )
    return found


def is_lent(name: str) -> bool:
    """Return whether a lent object, of any kind, has this name."""
    return any(name == other for _, other in _lent)


def pickled(value: Any, apart: Callable[[Any], str | None] = lambda part: None) -> bytes:
    """Return a value, and the lent objects, as bytes for :func:`unpickled` in a worker process.

    Lent data sets are left out: workers do not load data sets.

    :param apart: returns the name of a part of the value that travels apart from the bytes; None for all others.
    :raises ConfigError: a part cannot be pickled.
    """
    import cloudpickle  # here: importing it takes 20 ms, and only runs with workers need it

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, part: Any) -> str | None:
            return apart(part)

    file, sent = io.BytesIO(), {key: found for key, found in _lent.items() if key[0] != "dataset"}
    try:
        Pickler(file).dump((value, sent))
    except Exception as error:  # a program's objects can raise anything
        names = ", ".join(f"{kind} {name!r}" for kind, name in sent) or "its data set"
        raise ConfigError(
            f"an object that was given to the run cannot be sent to a worker process ({names}: {error}). Use workers=0"
        ) from error
    return file.getvalue()


def unpickled(sent: bytes, find_part: Callable[[str], Any]) -> Any:
    """Return the value of :func:`pickled` in another process, and lend its objects there until the process ends.

    :param sent: bytes from the process that started this one, through their own connection. Never pass bytes of another
        origin, such as a file or another machine: unpickling executes code.
    :param find_part: returns a part that travelled apart from the bytes.
    :raises ConfigError: a part cannot be unpickled here.
    """

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: str) -> Any:
            return find_part(name)

    try:
        value, found = Unpickler(io.BytesIO(sent)).load()
    except Exception as error:  # a program's objects can raise anything
        raise ConfigError(
            f"a worker process cannot load the objects that were given to the run ({type(error).__name__}: {error}). "
            "Put them into a module, or use workers=0"
        ) from error
    _lent.update(found)
    return value


def import_name(value: Any) -> str | None:
    """Return the name under which every process can import a function or class; None if there is no such name."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not value:
        return None
    if module.__name__ != "__main__":
        return f"{CODE}{module.__name__}.{name}" if module.__spec__ is not None else None
    stem = main_module(module)
    return f"{CODE}{stem}.{name}" if stem else None


def main_module(main: ModuleType) -> str | None:
    """Return the name under which the running program can be imported; None for a notebook, for example."""
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
