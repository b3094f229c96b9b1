"""Repositories of authors, and libraries that are no packages: their code runs from a checkout."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from unittest.mock import MagicMock

CHECKOUTS = Path(os.environ.get("ORACLES_CHECKOUTS", Path(__file__).resolve().parents[1] / ".checkouts"))


def modules(
    repository: str,
    commit: str,
    inside: str,
    *names: str,
    without: Iterable[str] = (),
    instead: Mapping[str, object] = MappingProxyType({}),
) -> list[ModuleType]:
    """Import modules of a checkout.

    :param inside: the folder that the repository's scripts run in.
    :param without: modules that it imports and that are not needed here: data, pictures, logs.
    :param instead: modules that stand in for its own.
    """
    folder = CHECKOUTS / repository.partition("/")[2]
    if not folder.exists():
        address = f"https://github.com/{repository}"
        sys.exit(f"{folder} is missing: git clone {address} {folder}, and git checkout {commit} in it")
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        at = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - our own words
        if not at.startswith(commit):
            sys.exit(f"{folder} is at {at[:7]}: git checkout {commit} in it")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("utils", "models", "flcore", "datasets")]:
        del sys.modules[name]  # other repositories' modules have these names, too
    sys.modules.update({name: MagicMock() for name in without})
    sys.modules.update(instead)
    sys.path.insert(0, str(folder / inside))
    found = [importlib.import_module(name) for name in names]
    del sys.path[0]
    for name in (*without, *instead):  # torch, too, looks some of them up
        sys.modules.pop(name, None)
    return found
