"""The check of a cluster's nodes: the same software as the machine of the run, and the run's folder."""

from __future__ import annotations

import json
import os
import platform
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedcore import ConfigError
from fedcore.base import registry
from fedcore.base.files import storing
from fedcore.runs.provenance import installed_versions
from fedcore_ray.cluster import Cluster

SERVER_SIDE = ("tracker", "command")
"""Kinds of parts that no client needs."""


def check_nodes(cluster: Cluster, state_dir: Path) -> None:
    """Refuse nodes with other software, or without the run's folder.

    :param state_dir: where the clients' states are kept.
    :raises ConfigError: names the node, what differs, and what to do.
    :raises FedcoreError: fedcore cannot be imported there at all.
    """
    mark = state_dir / f".seen-by-server-{uuid.uuid4().hex}"
    with storing(mark):
        state_dir.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        here = describe()
        for name, answer in cluster.on_each_node(look, str(mark)):
            _compare(here, json.loads(answer), name, state_dir)
    finally:
        mark.unlink()


def look(mark: str) -> str:
    """Run on a node: return, as JSON, what is installed there, and whether it can write to the mark's folder."""
    return json.dumps({**describe(), "shares": os.access(mark, os.W_OK) and os.access(Path(mark).parent, os.W_OK)})


def describe() -> dict[str, Any]:
    """Return the versions that bits depend on, and the instructions that torch uses."""
    away = {point.dist.name for kind in SERVER_SIDE for point in registry.available(kind).values() if point.dist}
    versions = {name: version for name, version in installed_versions().items() if name not in away - {"fedcore"}}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _compare(here: Mapping[str, Any], there: Mapping[str, Any], name: str, state_dir: Path) -> None:
    """Compare one node with this machine."""
    ours, theirs = here["versions"], there["versions"]
    different = [
        f"{package} is {theirs.get(package, 'missing')} (here {ours.get(package, 'missing')})"
        for package in sorted({*ours, *theirs})
        if ours.get(package) != theirs.get(package)
    ]
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise ConfigError(
            f"{name} has other software than this machine: {', '.join(different[:5])}{more}. Install the same "
            "packages on every node, and start Ray from that environment."
        )
    if not there["shares"]:
        raise ConfigError(
            f"{name} does not share {state_dir} with this machine, or may not write there. Clients' states are kept "
            "there: put the run directory on a file system that all nodes have at the same path, with --out"
        )
    if here["cpu"] != there["cpu"]:
        warnings.warn(
            f"{name} computes with other instructions ({there['cpu']}) than this machine ({here['cpu']}): results may "
            "differ in their last bits from run to run",
            RuntimeWarning,
            stacklevel=2,
        )
