"""Where a command is started decides nothing about what its processes import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ["torch", "numpy", "safetensors", "fedcore", "fedcore_moon", "json", "yaml", "sklearn", "tensorboard"]
SMALL = ["--workers", "1", "--clients", "2", "--rounds", "1", "--samples", "100", "--partition", "iid", "--quiet"]


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """Return a folder full of modules that leave a trace when they are imported."""
    folder = tmp_path / "strange"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\n")
    return folder


def run(folder: Path, *command: object) -> None:
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--plugin", "moon", *SMALL, "--tracker", "tensorboard", "--out", "run"],
        # A run's process and its worker are started by the sweep's; --parallel 1 lets the run have one.
        pytest.param(
            ["sweep", "--grid", "plugin=moon", *SMALL, "--tracker", "tensorboard", "--parallel", "1", "--out", "sweep"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["train", "sweep"],
)
def test_a_folder_with_modules_of_known_names_is_not_imported_from(
    strange: Path, tmp_path: Path, command: list[str]
) -> None:
    run(strange, Path(sys.executable).parent / "fedcore", *command)
    assert not (tmp_path / "ran").exists(), f"imported: {(tmp_path / 'ran').read_text()}"


METHOD = """
from fedcore import Plugin, hookimpl


class Mine(Plugin):
    @hookimpl
    def end_local(self, client):
        client.state["trained"] = True
"""
SCRIPT = """
import sys
from pathlib import Path

from my_method import Mine

from fedcore_testing import federate, records

result = federate(Path(sys.argv[1]), Mine, rounds=1, workers=1)
assert not any(record["failures"] for record in records(result)), records(result)
"""


@pytest.mark.slow
def test_workers_find_what_lies_beside_a_script(tmp_path: Path) -> None:
    for name in ("scripts", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "scripts" / "my_method.py").write_text(METHOD)
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    run(tmp_path / "elsewhere", sys.executable, tmp_path / "scripts" / "script.py", tmp_path)
