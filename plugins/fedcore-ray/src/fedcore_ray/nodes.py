"""What every node of a cluster must have in common with the machine that the run was started on."""

from __future__ import annotations

import json
import platform
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedcore import ConfigError
from fedcore.tools import files, installed_versions, registry
from fedcore_ray.cluster import Cluster

SERVER_SIDE = ("tracker", "command")
"""Kinds of parts that no client needs."""


def check_nodes(cluster: Cluster, state_dir: Path) -> None:
    """Refuse nodes with other software, or without the run's folder.

    :param state_dir: where the clients' states are kept.
    :raises ConfigError: names the node, what differs, and what to do.
    :raises FedcoreError: fedcore cannot be imported there at all.
    """
    token = uuid.uuid4().hex
    marker = state_dir / f".seen-by-server-{token}"
    with files.storing(marker):
        state_dir.mkdir(parents=True, exist_ok=True)
        marker.write_text(token, encoding="utf-8")
    try:
        here = describe()
        for name, answer in cluster.on_each_node(look, str(state_dir), token):
            _compare(here, json.loads(answer), name, state_dir)
    finally:
        for left in state_dir.glob(f".seen-by-*-{token}"):
            left.unlink(missing_ok=True)


def look(state_dir: str, token: str) -> str:
    """Run on a node: return its software as JSON, and leave a file in the run's folder."""
    folder = Path(state_dir)
    answer = {**describe(), "file": None}
    try:
        if (folder / f".seen-by-server-{token}").read_text(encoding="utf-8") == token:
            reply = folder / f".seen-by-{uuid.uuid4().hex}-{token}"
            reply.write_text(token, encoding="utf-8")
            answer["file"] = reply.name
    except OSError as error:
        answer["problem"] = str(error)
    return json.dumps(answer)


def describe() -> dict[str, Any]:
    """Return the versions that bits depend on, and the instructions that torch uses."""
    away = {point.dist.name for kind in SERVER_SIDE for point in registry.available(kind).values() if point.dist}
    versions = {name: version for name, version in installed_versions().items() if name not in away}
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
    if there["file"] is None or not (state_dir / there["file"]).exists():
        raise ConfigError(
            f"{name} does not share {state_dir} with this machine{_because(there)}. Clients' states are kept there: "
            "put the run directory on a file system that all nodes have at the same path, with --out"
        )
    if here["cpu"] != there["cpu"]:
        warnings.warn(
            f"{name} computes with other instructions ({there['cpu']}) than this machine ({here['cpu']}): results may "
            "differ in their last bits from run to run",
            RuntimeWarning,
            stacklevel=2,
        )


def _because(there: Mapping[str, Any]) -> str:
    return f" ({there['problem']})" if "problem" in there else ""
