"""What a tracker's process leaves for the next one of the same run, under ``trackers/`` in the run directory."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedcore.base.files import parse_json, write_bytes


@dataclass
class Memory:
    """How far a tracker is.

    :param round: the first round that it has not taken.
    :param status: ``running``, or how its process ended.
    :param error: why it was switched off.
    :param state: the tracker's own.
    """

    round: int = 0
    status: str = "new"
    error: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Memory:
        """Read a tracker's file; where there is none, nothing has happened yet."""
        return cls(**parse_json(file.read_bytes())) if file.exists() else cls()

    def write(self, file: Path) -> None:
        """Write the file: a reader sees the old one or the new one.

        :raises RuntimeError: the tracker keeps what is no JSON.
        """
        try:
            text = json.dumps(asdict(self))
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"run.state can hold JSON only: {error}") from error
        file.parent.mkdir(exist_ok=True)
        write_bytes(file, text.encode(), sync=False)


def memory_file(directory: Path, name: str) -> Path:
    """Return a tracker's file in a run directory; its log and lock stand beside it."""
    return directory / "trackers" / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.json"
