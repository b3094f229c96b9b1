"""Write docs/methods.md, the table of all methods: ``python tools/site/methods.py``, after a change of a package.

A method's group is the keyword ``fedcore: GROUP`` of its package. Its summary is its part of the package's description.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from links import ROOT
from sources import entry_points, plugin_packages

PAGE = ROOT / "docs" / "methods.md"
GROUPS = {
    "papers": "The five papers",
    "local training": "Local training",
    "server steps and selection": "Server steps and selection of clients",
    "personalised models": "Personalised models",
    "classifier correction": "Classifier correction after training",
    "communication": "Communication",
    "robustness and privacy": "Robustness and privacy",
    "heterogeneous data": "Heterogeneous data, next to any method",
    "diagnostics": "Diagnostics, next to any method",
}
MARK = "fedcore: "
INTRODUCTION = """# Methods

Each method is a plugin; some share a package. `make setup` installs all of them. `fedavg` (McMahan et al., AISTATS
2017) is built in. `fedcore plugins show moon` prints options and hooks. [Methods combine](combine.md).
[Personal models](personal.md) helps to choose a method that gives each client its own model.
"""
RULES = """## In every method

These rules hold for all methods; a method's card names what differs.

- Clients are sampled uniformly, without replacement. Models are averaged by the clients' samples, buffers such as
  BatchNorm's statistics included. Sums are float64, and float32 travels.
- Terms act on the trainable parameters that clients share. They are part of the loss, so they pass through momentum
  and `--clip-norm`. Momentum begins anew in each round.
- Parameters that stay on a client keep their buffers there, also over rounds in which the client does not take part.
  Parameters that every client froze in a round keep their value and the server's state of them.
- Batches are shuffled. The last short batch is trained, but for a single sample in front of BatchNorm.
- Frozen models and evaluations run in eval mode, without gradient.
"""


def page() -> str:
    """Return the page."""
    made = [INTRODUCTION]
    for title, packages in grouped().items():
        rows = [row for package in packages for row in _rows(package)]
        made.append("\n".join([f"## {title}\n", "| plugin | what it does |", "| --- | --- |", *rows]) + "\n")
    return "\n".join([*made, RULES])


def grouped() -> dict[str, list[Path]]:
    """Return the packages of each group, by its title."""
    found: dict[str, list[Path]] = {title: [] for title in GROUPS.values()}
    for package in plugin_packages():
        (group,) = (word.removeprefix(MARK) for word in _project(package)["keywords"] if word.startswith(MARK))
        found[GROUPS[group]].append(package)
    return found


def _rows(package: Path) -> Iterator[str]:
    parts = _project(package)["description"].split("; ")
    for name in entry_points(package):
        said = next((part for part in parts if part.partition(" ")[0].strip(":").lower() == name), parts[0])
        yield f"| [`{name}`](../plugins/{package.name}) | {said} |"


def _project(package: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
