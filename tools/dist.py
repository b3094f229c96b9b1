"""Build every distribution, the core and each package in plugins/: python tools/dist.py FOLDER [PROJECT ...].

A wheel is built from the unpacked sdist, so that what is published can be built from what is published.
"""

from __future__ import annotations

import argparse
import contextlib
import tarfile
import tempfile
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).resolve().parent.parent


def build(project: Path, folder: Path) -> tuple[Path, Path]:
    """Write a project's sdist and wheel into a folder and return their paths."""
    with contextlib.chdir(project):
        sdist = folder / build_sdist(str(folder))
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        with contextlib.chdir(Path(scratch) / sdist.name.removesuffix(".tar.gz")):
            wheel = folder / build_wheel(str(folder))
    return sdist, wheel


def main() -> None:
    """Build the projects that are named, or all."""
    parser = argparse.ArgumentParser(description="Build wheels and sdists.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("project", type=Path, nargs="*", help="folder with a pyproject.toml; default all")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for project in arguments.project or [ROOT, *sorted((ROOT / "plugins").iterdir())]:
        for path in build(project.resolve(), arguments.folder.resolve()):
            print(path.name)


if __name__ == "__main__":
    main()
