"""Environments with our wheels from a folder, and with third-party packages only that these wheels declare.

Third-party packages take minutes to install, so the ones here are lent: a folder of links to those that wheels require,
and to what these require in turn, from the environment of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def lend(folder: Path, index: Path, *needed: str) -> None:
    """Fill a folder with links to the third-party packages that these requirements bring."""
    waiting = [Requirement(need) for need in needed]
    seen: set[tuple[str, str]] = set()
    while waiting:
        need = waiting.pop()
        for extra in ("", *need.extras):
            name = canonicalize_name(need.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            wheels = list(index.glob(f"{name.replace('-', '_')}-*.whl"))
            if not wheels:
                link(folder, distribution(name))
            required = (
                metadata(*wheels).requires_dist if wheels else map(Requirement, distribution(name).requires or [])
            )
            waiting += [need for need in required if need.marker is None or need.marker.evaluate({"extra": extra})]


def metadata(wheel: Path) -> Metadata:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name))


def link(folder: Path, found: Distribution) -> None:
    """Link what a distribution has at the top of site-packages."""
    for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(found.locate_file(top))


def foreign(folder: Path, version: str = "9.9") -> Path:
    """Write a wheel of another project's distribution ``fedcore``, which has a package of that name, too."""
    information = f"fedcore-{version}.dist-info"
    files = {
        "fedcore/__init__.py": "",
        "fedcore/data/__init__.py": "def compress(): ...\n",
        "fedcore/algorithm/__init__.py": "",
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: fedcore\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{information}/RECORD"))
    path = folder / f"fedcore-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for name, text in {**files, f"{information}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


class Environment:
    """A virtual environment in a folder, with packages lent to it, and an empty working directory beside it.

    :ivar lent: the folder of lent packages.
    """

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.empty, self.lent = folder / "empty", folder / "lent"
        for path in (self.empty, self.lent):
            path.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (self.spec,) = (folder / "venv" / "lib").glob("*/site-packages")
        (self.spec / "lent.pth").write_text(f"{self.lent}\n")

    def run(self, program, *arguments, code=0):
        """Run one of the environment's programs in the empty directory; returns stdout, stderr where it fails."""
        return self._run([self.bin / program, *map(str, arguments)], code)

    def pip(self, *arguments):
        """Run the pip of these tests on this environment, which has none of its own; returns what it prints."""
        return self._run([sys.executable, "-m", "pip", "--python", self.bin / "python", *map(str, arguments)], 0)

    def install(self, index, *needed):
        self.pip("install", "--quiet", "--no-index", "--find-links", index, *needed)

    def _run(self, command, code):
        hidden = ("PYTHON", "FEDCORE", "VIRTUAL_ENV", "PIP_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        # No other place of wheels, which pip's configuration may name.
        environment |= {"NO_COLOR": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(command, cwd=self.empty, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def ours(self) -> set[str]:
        """Return the names of the installed distributions that are called fedcore, or begin so."""
        names = {row["name"] for row in json.loads(self.pip("list", "--format", "json"))}
        return {name for name in names if name.startswith("fedcore")}

    def train(self, out, *arguments):
        """Train on digits, and return the summary."""
        self.run("fedcore", "train", *arguments, "--rounds", 2, "--clients", 4, "--out", out, "--quiet")
        return json.loads((self.empty / out / "summary.json").read_text())

    def plugins(self):
        """Return the packages of the installed plugins, trackers and engines, by name."""
        code = (
            "import json; from fedcore.tools import registry; kinds = ('plugin', 'tracker', 'engine'); "
            "print(json.dumps({n: p.dist.name for kind in kinds for n, p in registry.available(kind).items()}))"
        )
        return json.loads(self.run("python", "-c", code))
