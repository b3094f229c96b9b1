"""The wheels in an environment with nothing else of fedcore, and with third-party packages only that they declare.

Third-party packages take minutes to install, so the ones here are lent: a folder of links to those that fedcore's
metadata asks for, and to what these ask for in turn. No extra, no development tool and no source tree is in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

STUDIES = ("sweep", "compare", "reproduce", "results", "report", "bench", "runs")
"""The commands of fedcore-study."""


@pytest.fixture(scope="module")
def lent(dist, tmp_path_factory):
    """Return a folder with links to what the wheels of the core and of FedCD require."""
    folder = tmp_path_factory.mktemp("lent")
    waiting = []
    for wheel in (*dist.glob("fedcore_fl-*.whl"), *dist.glob("fedcore_fedcd-*.whl")):
        with ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
            required = Metadata.from_email(archive.read(name)).requires_dist
        waiting += [need for need in required if need.marker is None and not need.name.startswith("fedcore")]
    seen: set[str] = set()
    while waiting:
        needed = waiting.pop()
        if canonicalize_name(needed.name) in seen:
            continue
        seen.add(canonicalize_name(needed.name))
        found = distribution(needed.name)
        for top in tops(found):
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        waiting += [need for need in map(Requirement, found.requires or []) if applies(need)]
    assert not [path.name for path in folder.iterdir() if "fedcore" in path.name]
    return folder


def applies(need):
    return need.marker is None or need.marker.evaluate({"extra": ""})


def tops(found: Distribution) -> set[str]:
    """Return what a distribution has at the top of site-packages."""
    parts = {path.parts[0] for path in found.files or ()}
    return parts - {"..", "__pycache__"}


class Environment:
    """A virtual environment in a folder, and an empty working directory beside it."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.empty = folder / "empty"
        self.empty.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (self.spec,) = (folder / "venv" / "lib").glob("*/site-packages")

    def run(self, program, *arguments, code=0):
        """Run one of the environment's programs in the empty directory; returns stdout, stderr where it fails."""
        return self._run([self.bin / program, *map(str, arguments)], code)

    def pip(self, *arguments):
        """Run the pip of these tests on this environment, which has none of its own."""
        self._run([sys.executable, "-m", "pip", "--python", self.bin / "python", *map(str, arguments), "--quiet"], 0)

    def _run(self, command, code):
        hidden = ("PYTHON", "FEDCORE", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        done = subprocess.run(
            command, cwd=self.empty, env={**environment, "NO_COLOR": "1"}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def train(self, out, *arguments):
        """Train on digits, and return the summary."""
        self.run("fedcore", "train", *arguments, "--rounds", 2, "--clients", 4, "--out", out, "--quiet")
        return json.loads((self.empty / out / "summary.json").read_text())

    def plugins(self):
        return {row["name"]: row["package"] for row in json.loads(self.run("fedcore", "plugins", "list", "--json"))}


def test_wheels_in_an_empty_environment(dist, lent, tmp_path):
    environment = Environment(tmp_path)
    (environment.spec / "lent.pth").write_text(f"{lent}\n")
    assert "No module named 'fedcore'" in environment.run("python", "-c", "import fedcore", code=1)

    environment.pip("install", "--no-index", "--find-links", dist, "fedcore-fedcd")
    origin = environment.run("python", "-c", "import fedcore, fedcore_fedcd as p; print(fedcore.__file__, p.__file__)")
    assert all(Path(path).is_relative_to(environment.spec) for path in origin.split())
    assert environment.plugins() == {
        "fedavg": "fedcore-fl",
        "fedcd": "fedcore-fedcd",
        "local": "fedcore-fl",
    }
    summary = environment.train("with", "--plugin", "fedcd")
    assert summary["metrics"]["global"]["accuracy"] > 0.2
    assert [path.name for path in environment.empty.iterdir()] == ["with"], "a run leaves its directory and no more"

    assert "pip install fedcore-testing" in environment.run("fedcore", "plugins", "new", "my-own", code=2)
    assert "pip install fedcore-zoo" in environment.run("fedcore", "train", "--dataset", "cifar10", code=2)

    for command in STUDIES:
        refused = environment.run("fedcore", command, code=2)
        assert "pip install fedcore-study" in refused, command
        assert "Traceback" not in refused, command
    environment.pip("install", "--no-index", "--find-links", dist, "fedcore-fl[study]")
    for command in STUDIES:
        environment.run("fedcore", command, "--help")
    assert "fedcore reproduce fedcd --table 1" in environment.run("fedcore", "reproduce", "fedcd")

    environment.pip("uninstall", "--yes", "fedcore-fedcd", "fedcore-study")
    assert environment.plugins() == {"fedavg": "fedcore-fl", "local": "fedcore-fl"}
    refused = environment.run("fedcore", "train", "--plugin", "fedcd", code=2)
    assert "pip install fedcore-fedcd" in refused
    assert "Traceback" not in refused
    alone = environment.train("alone")
    assert alone["metrics"]["global"]["accuracy"] > 0.2
    environment.run("fedcore", "resume", "alone", "--rounds", 3, "--quiet")
    assert json.loads((environment.empty / "alone" / "summary.json").read_text())["rounds"] == 3
    evaluated = json.loads(environment.run("fedcore", "evaluate", "alone", "--json"))
    assert evaluated["global"]["samples"] > 0
    assert "digits" in environment.run("fedcore", "data", "list")
