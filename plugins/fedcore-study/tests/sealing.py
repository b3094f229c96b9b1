"""Digests and checksums of run directories that tests write or change by hand."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from fedcore.runs.saved import Binding, bound, partition_digest
from fedcore.storage.config_file import BESIDE_OPTIONS
from fedcore.storage.json_values import sealed


def seal(folder: Path) -> None:
    """Make a directory's files fit together again, as they are now."""
    content = yaml.safe_load((folder / "config.yaml").read_text())
    partition = json.loads((folder / "partition.json").read_text())
    values = {name: value for name, value in content.items() if name not in BESIDE_OPTIONS}
    binding = Binding(bound(values), partition_digest(partition["sha256"], partition["info"]), "")
    content["digests"] = binding.digests()
    (folder / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    for name in ("metrics.jsonl", "sessions.jsonl", "summary.json"):
        file = folder / name
        if file.exists():
            text = file.read_text()
            lines = [json.loads(part) for part in (text.splitlines() if name.endswith("l") else [text])]
            plain = [{key: value for key, value in line.items() if key != "crc32"} for line in lines]
            file.write_text("".join(f"{json.dumps(sealed(line, binding.mark))}\n" for line in plain))
