"""Names to objects, and objects to names.

:func:`resolve` asks a chain: the objects that a Python program *lent* to its run, code that is imported by its path
(``module:package.attribute``), and entry points of installed packages. Data sets, models, partitioners and metrics of
other libraries have names such as ``timm:resnet18``. The prefix is an entry point of the group
``fedcore.dataset_prefixes``, ``fedcore.model_prefixes`` and so on: a function that takes the rest of the name and
returns the loader, factory or partitioner.

Looking up a name reads package metadata only. The object's module is imported when the name is resolved. Imports no
torch.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcore.base.errors import ConfigError, FedcoreError, PluginContractError, UnknownNameError, place_of

CORE = "fedcore-fl"
"""The distribution of the package ``fedcore``: on the public index the name ``fedcore`` belongs to another project."""

OBJECT = "object:"
"""Prefix of the name of an object that no other program can import."""

CODE = "module:"
"""Prefix of a name that is imported: ``module:package.module.attribute``."""

Key = tuple[str, str]
"""Kind, such as ``model``, and name."""

LENT: dict[Key, Any] = {}
"""The objects that a Python program lent to its run, by kind and name; see :func:`lent`."""

PREFIXED = ("dataset", "model", "partitioner", "metric", "augmentation")
"""The kinds of which other libraries have objects, by the entry points of a ``KIND prefix``."""

NAMED = ("plugin", "dataset", "model", "partitioner", "engine", "tracker", "metric")
"""The kinds of objects that a configuration names."""


def group_of(kind: str) -> str:
    """Return the group of a kind's entry points: ``fedcore.model_prefixes`` of the kind ``model prefix``."""
    plural = kind if kind == "tracking" else f"{kind}{'es' if kind.endswith('x') else 's'}"
    return f"fedcore.{plural.replace(' ', '_')}"


def available(kind: str) -> dict[str, EntryPoint]:
    """Return the installed entry points of a kind by name, fedcore's own first. Imports nothing.

    A name that two distributions provide is included. :func:`resolve` refuses it; see :func:`conflict`.
    """
    return {name: points[0] for name, points in _scan(kind, tuple(sys.path)).items()}


def conflict(kind: str, name: str) -> str:
    """Return a message if two distributions provide the same name, with the remedy; else an empty text."""
    points = _scan(kind, tuple(sys.path)).get(name, [])
    if len({point.value for point in points}) < 2:
        return ""
    origins = dict.fromkeys(map(_origin, points))
    return f"{kind} {name!r} is provided twice: by {' and by '.join(origins)}. Uninstall one of the two packages."


@functools.cache
def _scan(kind: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    by_name: dict[str, list[EntryPoint]] = {}
    points = _read(path).select(group=group_of(kind))
    for point in sorted(points, key=lambda point: (not point.value.startswith("fedcore."), point.name)):
        by_name.setdefault(point.name, []).append(point)
    return by_name


@functools.cache
def _read(path: tuple[str, ...]) -> Any:  # the type is another one in each version of Python
    """Read the metadata on a search path once for all kinds: reading takes longer than a round of a small run."""
    return entry_points()


def resolve(kind: str, name: str) -> Any:
    """Return the object behind a name.

    :raises UnknownNameError: no installed package provides the name. The message suggests a name or a package.
    :raises PluginContractError: the module behind the name cannot be imported. The message names a missing package.
    :raises ConfigError: two installed packages provide the name, or it belongs to an object of a Python program.
    """
    if (kind, name) in LENT:
        return LENT[kind, name]
    if is_code(name):
        return _import_attribute(kind, name)
    points = available(kind)
    if name in points:
        return _load(kind, name, points[name])
    if name.startswith(OBJECT):
        raise ConfigError(_how_to_lend(kind, name))
    prefix, colon, rest = name.partition(":")
    prefixes = available(f"{kind} prefix") if kind in PREFIXED else {}
    if colon and prefix in prefixes:
        return call(kind, name, resolve(f"{kind} prefix", prefix), rest)
    if package := package_of(f"{kind} prefix", prefix) if colon else package_of(kind, name):
        raise UnknownNameError(kind, name, (), is_in(repr(name), package))
    if meant := _meant(kind, name, points):
        raise UnknownNameError(kind, name, (), meant)
    others = ", ".join(f"{each}:NAME" for each in prefixes)
    raise UnknownNameError(kind, name, points, f"Or {others}" if others else "")


def needed(kind: str, name: str, request: str) -> Any:
    """Return the object of a package that a user asked for without its name.

    :param request: what the user wrote, such as ``--workers 2``.
    :raises ConfigError: the package is not installed. The message names it.
    """
    if name not in available(kind) and (package := package_of(kind, name)):
        raise ConfigError(f"{request} needs the package {package}: {how_to_install(package)}")
    return resolve(kind, name)


def _how_to_lend(kind: str, name: str) -> str:
    """Return what to do about the name of an object of a Python program, which has to give the object again."""
    if kind == "partitioner":
        return (
            f"partition {name!r} was made by a Python program; give fedcore.run the partition again, or name the run's "
            "file: --partition RUN_DIR/partition.json"
        )
    argument = f"{kind}s=[...]" if kind in ("plugin", "metric") else f"{kind}=..."
    return (
        f"{kind} {name!r} is an object that a Python program gave to its run; give it again in Python: fedcore.run("
        f"config, {argument}) or fedcore.resume(path, {argument}); evaluate_run and load_run take it, too"
    )


def _load(kind: str, name: str, point: EntryPoint) -> Any:
    if twice := conflict(kind, name):
        raise ConfigError(twice)
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # an imported module can raise anything, as a script with argparse does
        fault = f"of {_origin(point)} cannot be imported from {point.value!r}"
        raise PluginContractError.of(
            name, f"{fault}: {type(error).__name__}: {error}", kind=kind, hint=_missing(error, point)
        ) from error


def _meant(kind: str, name: str, points: Collection[str]) -> str:
    """Return a hint on what an unknown name seems to mean; empty if there is none.

    It can mean an object of another kind, several methods, a package, a data file or code.
    """
    if other := next((other for other in NAMED if other != kind and name in available(other)), None):
        return f"{name!r} is the name of an installed {other}"
    parts = re.split(r"[,+\s]+", name)
    if kind in ("plugin", "tracker", "metric") and len(parts) > 1 and all(part in points for part in parts):
        return f"Write {' '.join(f'--{kind} {part}' for part in parts)}, in a file {kind}s: [{', '.join(parts)}]"
    if names := sorted(own for own, package in packages().get(kind, {}).items() if package == f"fedcore-{name}"):
        return f"The package fedcore-{name} has: {', '.join(names)}"
    if kind == "dataset" and (prefix := {".npz": "npz", ".csv": "hf", ".parquet": "hf"}.get(Path(name).suffix)):
        return f"Did you mean '{prefix}:{name}'?"
    if "." in name and all(part.isidentifier() for part in name.split(".")) and not Path(name).exists():
        return f"Did you mean '{CODE}{name}'?"
    return ""


def call(kind: str, name: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """Call the function behind a name and return its result.

    :raises PluginContractError: the object is not callable, or raised an exception other than a FedcoreError.
    """
    try:
        return function(*arguments, **options)
    except FedcoreError:
        raise
    except (Exception, SystemExit) as error:  # third-party code can raise anything
        place = place_of(error, getattr(function, "__module__", ""))
        raise PluginContractError.of(name, f"raised {type(error).__name__}: {error}{place}", kind=kind) from error


def _missing(error: BaseException, point: EntryPoint) -> str:
    """Return a hint on what to install if the import failed because it is missing; else empty."""
    if isinstance(error, AttributeError) and point.module in sys.modules:  # the module is there, the name is not
        return "if you renamed it, write the new name into pyproject.toml and install the package again"
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or missing in ("", point.module.partition(".")[0]):
        return ""
    return f"it needs the package {missing}: pip install {missing}"


@functools.cache
def packages() -> dict[str, dict[str, str]]:
    """Return fedcore's own packages, installed or not, by the kind and name of the objects that they provide.

    ``tools/packages.py`` writes the file.
    """
    known: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("packages.json").read_text("utf-8"))
    return known


def package_of(kind: str, name: str) -> str | None:
    """Return fedcore's own package that provides a name; None for names of the core and unknown names."""
    return packages().get(kind, {}).get(name)


def is_in(name: str, package: str) -> str:
    """Return the sentence that says which of fedcore's own packages has something, and how to install it."""
    return f"{name} is in the package {package}: {how_to_install(package)}"


def how_to_install(package: str) -> str:
    """Return the command that installs one of fedcore's own packages, from the checkout if fedcore runs from one."""
    folder = Path(__file__).parents[2] / "plugins" / package
    return f"pip install {f'-e {shlex.quote(str(folder))}' if folder.is_dir() else package}"


def is_code(name: str) -> bool:
    """Return whether a name stands for code that is imported by its path, ``module:package.attribute``."""
    return name.startswith(CODE)


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown distribution"


class RunWhileImported(ConfigError):
    """A module starts a run while a name makes fedcore import it."""


_importing: ContextVar[str | None] = ContextVar("importing", default=None)


def _import_attribute(kind: str, name: str) -> Any:
    path = name.removeprefix(CODE)
    module, _, attribute = path.replace(":", ".").rpartition(".")
    token = _importing.set(module)
    try:
        return getattr(importlib.import_module(module), attribute)
    except RunWhileImported:
        raise
    except (Exception, SystemExit) as error:  # an imported module can raise anything, as a script with argparse does
        raise ConfigError(
            f"{kind} {name!r}: cannot import {attribute!r} from module {module!r} "
            f"({type(error).__name__}: {error}). "
            "Write module:package.module.attribute, and make sure the package is installed or on PYTHONPATH."
        ) from error
    finally:
        _importing.reset(token)


def refuse_while_importing() -> None:
    """Refuse to start a run while fedcore imports the program that starts it.

    :raises RunWhileImported: the message says how to make the program importable.
    """
    if module := _importing.get():
        raise RunWhileImported(
            f"{module.rpartition('.')[2]}.py starts a run when it is imported; put fedcore.run below "
            'if __name__ == "__main__":'
        )


@contextmanager
def lent(objects: Mapping[Key, Any]) -> Iterator[None]:
    """Let :func:`resolve` find objects until the block ends."""
    before = dict(LENT)
    LENT.update(objects)
    try:
        yield
    finally:
        LENT.clear()
        LENT.update(before)


def is_lent(name: str) -> bool:
    """Return whether a lent object, of any kind, has this name."""
    return any(name == other for _, other in LENT)


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
    origin = spec and spec.origin
    return Path(file).stem if origin and Path(origin).resolve() == Path(file).resolve() else None


def object_name(value: Any) -> str:
    """Return a name for an object that no other process can import."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return OBJECT + "".join(letter for letter in name if letter.isalnum() or letter in "_-")
