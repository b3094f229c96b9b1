"""Digests of run directories that tests write or change by hand."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from fedcore.base.safe_yaml import BESIDE_OPTIONS
from fedcore.runs.saved import SavedConfig, partition_digest


def seal(folder: Path) -> None:
    """Make a directory's files fit together again, as they are now."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    partition = json.loads((folder / "partition.json").read_text())
    values = {name: value for name, value in content.items() if name not in BESIDE_OPTIONS}
    digest = partition_digest(partition["sha256"], partition["info"])
    changes = content.get("changes") or ()
    SavedConfig(values, digest, "", content.get("versions") or {}, changes).write(folder / "config.yaml")
