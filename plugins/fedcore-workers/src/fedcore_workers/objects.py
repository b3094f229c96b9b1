"""The objects that a Python program gave to its run, as bytes for the program's own processes. Imports no torch.

They are bytes of cloudpickle, from process to process and never through a file. A class of a script or notebook thus
travels by value, as in Ray and joblib.
"""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedcore import ConfigError
from fedcore.tools import registry

_read: dict[str, tuple[Any, bytes]] = {}
"""Module -> its spec, which a reload replaces, and its source, as this process last began workers with it."""


def refuse_edited(modules: Iterable[str]) -> None:
    """Refuse modules that were edited since this process began workers with them: workers would import another text.

    :param modules: names of modules with plugins and models. All imported modules of their packages are looked at.
    :raises ConfigError: names a module, and says how to import it again.
    """
    packages = {module.partition(".")[0] for module in modules}
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.partition(".")[0] not in packages or spec is None or not str(spec.origin).endswith(".py"):
            continue
        file = Path(spec.origin)
        if any(part.endswith("-packages") for part in file.parts) or not file.is_file():
            continue  # it is installed, or in an archive
        source, (seen, before) = file.read_bytes(), _read.get(name, (None, b""))
        if seen is spec and source != before:
            raise ConfigError(
                f"{spec.origin} was edited after this program had imported it: worker processes would train with the "
                f"new text, the server with the old one. Import it again: importlib.reload({name}), or a new process"
            )
        _read[name] = spec, source


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

    file, objects = io.BytesIO(), {key: lent for key, lent in registry.LENT.items() if key[0] != "dataset"}
    try:
        Pickler(file).dump((value, objects, _cells(objects.values())))
    except Exception as error:  # a program's objects can raise anything
        names = ", ".join(f"{kind} {name!r}" for kind, name in objects) or "its data set"
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
        value, objects, cells = Unpickler(io.BytesIO(sent)).load()
    except Exception as error:  # a program's objects can raise anything
        raise ConfigError(
            f"a worker process cannot load the objects that were given to the run ({type(error).__name__}: {error}). "
            "Put them into a module, or use workers=0"
        ) from error
    registry.LENT.update(objects)
    linecache.cache.update(cells)
    return value


def _cells(objects: Iterable[Any]) -> dict[str, Any]:
    """Return the cells of a notebook that define objects, as linecache keeps them: a run's record has their hash."""
    held = (each for lent in objects for each in (lent, *vars(lent if isinstance(lent, type) else type(lent)).values()))
    files = {each.__code__.co_filename for each in held if inspect.isfunction(each) and each.__module__ == "__main__"}
    return {file: linecache.cache[file] for file in files if file in linecache.cache}
