"""Provenance of a run's results: the code, the model, the machine and the time of its training."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import inspect
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from fedcore import __version__
from fedcore.base.config import RunConfig
from fedcore.base.identity import short_name
from fedcore.base.metrics import sign
from fedcore.base.process import cores
from fedcore.base.registry import CODE, CORE, LENT, OBJECT, available
from fedcore.client.setup import Setup
from fedcore.runs.saved import SOURCE, code_in

RECORDED = ("torch", "torchvision", "numpy", "scikit-learn", "pluggy", "safetensors")
INSTRUCTIONS = "instruction set"
"""The name, in :func:`versions`, of the instruction set with which torch computes on the CPU."""

COMMIT = "fedcore's commit"
"""The name, among versions that are compared, of the commit of the checkout from which fedcore is imported."""

_known: dict[str, tuple[set[str], list[Any], str]] = {}
"""Module -> its files, the specs of those that are imported, which a reload replaces, and their hash at the import."""

_ROOT = Path(__file__).resolve().parents[2]


def session(setup: Setup) -> dict[str, Any]:
    """Return the record of a process that trains a run: plain values, without host name or paths."""
    model, device, kind = setup.model, setup.placement.device, setup.task.kind
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "started": now(),
        "commit": commit(),
        "versions": versions(setup.config),
        "machine": {"cpu": _cpu(), "cores": cores(), "gpu": gpu, "system": f"{platform.system()} {platform.machine()}"},
        "task": {"name": kind.name, "signs": {name: sign(name, setup.metrics) for name in kind.metrics}},
        "model": {"parameters": sum(p.numel() for p in model.parameters()), "projection": model.projection_width},
        "notes": setup.notes,
    }


def versions(config: RunConfig) -> dict[str, str]:
    """Return the versions on which a run's bits depend: packages, instruction set, hashes of code.

    The hashes are of the user's own code and of the packages of the run's plugins: an editable package that changes
    keeps its version.
    """
    modules = {name: name.removeprefix(CODE) for name in code_in(config)}
    for name, point in available("plugin").items():
        if name in config.plugins and point.dist:
            modules[f"{SOURCE}{point.dist.name}"] = point.module
    source = functools.cache(_source)  # several names may be of one package
    code = {name: source(re.split("[.:]", module)[0]) for name, module in modules.items()}
    for (_, name), lent in LENT.items():
        if name in config.names() and name.startswith(OBJECT) and (text := _text(lent)):
            code[f"{SOURCE}{short_name(name)}"] = text
    return {**installed_versions(), INSTRUCTIONS: torch.backends.cpu.get_cpu_capability(), **code}


def _source(module: str) -> str:
    """Return the SHA-256 of a module's source, or of all modules of a package; empty if it cannot be read.

    It includes modules and packages of the same folder that it imports, such as a study's ``layers.py``, but none of
    ``site-packages``, which have versions, or of fedcore's checkout, which has a commit. What this process has imported
    counts: an edit does after a reload.
    """
    if (known := _known.get(module)) and [*map(id, known[1])] == [*map(id, _specs(known[0]))]:
        return known[2]
    digest, read = hashlib.sha256(), set[str]()
    try:
        spec = importlib.util.find_spec(module)
        paths = [Path(place) for place in spec.submodule_search_locations or [str(spec.origin)]] if spec else []
        for path in paths:  # the list grows
            files = sorted(path.rglob("*.py")) or [path]
            code = b"".join(file.read_bytes() for file in files)
            digest.update(code)
            read.update(map(str, files))
            imports = b" ".join(re.findall(rb"^[ \t]*(?:from|import)[ \t].+", code, re.MULTILINE))
            words = {*re.findall(r"\w+", imports.decode(errors="replace"))}
            beside = () if path.parent.name.endswith("-packages") or path.parent == _ROOT else path.parent.iterdir()
            others = {*beside}.difference(paths)
            paths += sorted(p for p in others if p.stem in words and (p.suffix == ".py" or any(p.glob("*.py"))))
    except (ImportError, OSError, ValueError):
        return ""
    _known[module] = read, _specs(read), digest.hexdigest()
    return _known[module][2]


def _specs(files: set[str]) -> list[Any]:
    """Return the specs of the imported modules of these files."""
    return [part.__spec__ for part in [*sys.modules.values()] if getattr(part, "__file__", None) in files]


def _text(lent: Any) -> str:
    """Return the SHA-256 of the text of a notebook's class or function; empty of other objects."""
    held = {"": lent, **vars(lent if isinstance(lent, type) else type(lent))}.values()
    functions = [each for each in held if inspect.isfunction(each) and each.__module__ == "__main__"]
    with suppress(OSError):  # of the interpreter's own prompt nothing is kept
        return hashlib.sha256("".join(map(inspect.getsource, functions)).encode()).hexdigest() if functions else ""
    return ""


@functools.cache  # it reads every package's metadata
def installed_versions() -> dict[str, str]:
    """Return the versions of fedcore, its plugins and the packages on which its numbers depend.

    Fedcore itself has the name ``fedcore`` here, not that of its distribution: so records of runs began, and stay.
    """
    installed = {}
    for distribution in distributions():
        name = distribution.name or ""  # an installation that was interrupted leaves a folder without metadata
        extends = any(point.group.startswith("fedcore.") for point in distribution.entry_points)
        if extends or name in RECORDED or name.startswith("fedcore"):
            installed[name] = distribution.version
    installed.pop(CORE, None)
    return dict(sorted({**installed, "fedcore": __version__}.items()))


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache  # the code that this process has imported does not change
def commit() -> str | None:
    """Return ``git describe`` of the checkout from which fedcore is imported; None if it is not from a checkout."""
    if not (_ROOT / ".git").exists():  # git would find the checkout of another project around site-packages
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git = ["git", "describe", "--always", "--dirty", "--tags", "--abbrev=12"]
    try:
        done = subprocess.run(git, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    with suppress(OSError):  # there is no such file, or it may not be read
        if named := re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE):
            return named[1].strip()
    return platform.processor() or platform.machine()
