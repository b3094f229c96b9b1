"""Run directories that tests write or change by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fedcore import RunConfig
from fedcore.base.safe_yaml import BESIDE_OPTIONS, write_yaml
from fedcore.runs.saved import SavedConfig, partition_digest

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast, where PyYAML was built with libyaml: some tests make a hundred runs."""


def seal(folder: Path) -> None:
    """Make a directory's files fit together again, as they are now."""
    content = yaml.load((folder / "config.yaml").read_text(), Loader=LOADER)  # noqa: S506 - libyaml's safe one
    partition = json.loads((folder / "partition.json").read_text())
    values = {name: value for name, value in content.items() if name not in BESIDE_OPTIONS}
    digest = partition_digest(partition["sha256"], partition["info"])
    changes = content.get("changes") or ()
    SavedConfig(values, digest, "", content.get("versions") or {}, changes).write(folder / "config.yaml")


@pytest.fixture
def make(tmp_path):
    """Write ``make(plugins, seed, [accuracy per round], final=..., **options)`` as a run; returns its folder."""
    number = iter(range(1000))

    def write(plugins, seed, curve, *, final=None, finished=True, protocol="global", labels="L", dealt=None, **options):
        folder = tmp_path / f"run{next(number)}"
        folder.mkdir()
        also = {name: {"accuracy": accuracy} for name, accuracy in options.pop("also", {}).items()}
        measured = options.pop("measured", {})
        config = RunConfig(plugins=plugins, seed=seed, rounds=options.pop("rounds", len(curve)), **options)
        (folder / "config.yaml").write_text(write_yaml(config.model_dump(mode="json")))
        dealt = dealt or f"{config.dataset}-{config.alpha}-{seed}"
        (folder / "partition.json").write_text(json.dumps({"sha256": dealt, "info": {"labels_sha256": labels}}))
        lines = [
            {
                "round": index,
                "bytes": {"down": 100, "up": 200},
                "metrics": None if accuracy is None else {"global": None, protocol: {"accuracy": accuracy}},
                "time": {"round": 1.0 + seed, "evaluation": 0.5},
                "of_a_later_version": 1,
            }
            for index, accuracy in enumerate(curve)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if finished:
            figures = {
                "global": None,
                protocol: {"accuracy": curve[-1] if final is None else final, **measured},
                **also,
            }
            spent = {"down": 100 * len(curve), "up": 200 * len(curve) + (0 if final is None else 50)}
            summary = {"metrics": figures, "rounds": len(curve), "bytes": spent}
            (folder / "summary.json").write_text(json.dumps(summary))
        seal(folder)
        return folder

    return write
