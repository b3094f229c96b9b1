"""What stands in the wheels: all files of the package and nothing else, true metadata, and the core that fits."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fedcore import __version__
from tests.support import in_one_test

ROOT = Path(__file__).parents[2]
PLUGINS = sorted((ROOT / "plugins").iterdir())
PROJECTS = [ROOT, *PLUGINS]
LICENSE = (ROOT / "LICENSE").read_bytes()
COMPILED = ("__pycache__", ".mypy_cache")


class Project(NamedTuple):
    """A folder with a pyproject.toml, its contents, and its package's folder."""

    folder: Path
    described: dict
    package: Path


def project_of(folder):
    described = tomllib.loads((folder / "pyproject.toml").read_text())
    package, *_ = described["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return Project(folder, described["project"], folder / package)


@contextmanager
def wheel_of(project, dist):
    """Open the project's wheel, with its metadata as checked by the reference implementation."""
    (path,) = dist.glob(f"{project.described['name'].replace('-', '_')}-*.whl")
    with ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        yield archive, Metadata.from_email(archive.read(name), validate=True)


every_project = in_one_test(project=map(project_of, PROJECTS))
every_plugin = in_one_test(project=map(project_of, PLUGINS))


@every_project
def test_a_wheel_holds_the_whole_package_and_nothing_else(project, dist):
    folder, _, package = project
    source = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path
        for path in package.rglob("*")
        if path.is_file() and not set(path.parts) & set(COMPILED)
    }
    if folder == ROOT:
        source |= {name: ROOT / name for name in ("fedcore_fl.py", "fedcore_fl.pth")}
    with wheel_of(project, dist) as (archive, _):
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert packed == set(source)
        assert [name for name, path in source.items() if archive.read(name) != path.read_bytes()] == []
        assert f"{package.name}/py.typed" in packed


@every_project
def test_metadata_is_complete_and_true(project, dist):
    folder, described, _ = project
    with wheel_of(project, dist) as (archive, metadata):
        assert metadata.name == described["name"] == ("fedcore-fl" if folder == ROOT else folder.name)
        assert metadata.summary
        assert metadata.license_expression == "Apache-2.0"
        (licence,) = metadata.license_files
        (stored,) = (name for name in archive.namelist() if name.endswith(f".dist-info/licenses/{licence}"))
        assert archive.read(stored) == LICENSE
        assert metadata.requires_python == SpecifierSet(">=3.11")
        assert metadata.description_content_type == "text/markdown"
        assert metadata.description.strip() == (folder / "README.md").read_text(encoding="utf-8").strip()
        assert not metadata.project_urls, "there is no address to name yet"
        assert not metadata.home_page
        points = "".join(
            archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")
        )
        assert points or folder.name == "fedcore-functional"
        for module in re.findall(r"= ([\w.]+):", points):
            path = module.replace(".", "/")
            assert {f"{path}.py", f"{path}/__init__.py"} & set(archive.namelist()), (
                f"{module} is in no file of the wheel"
            )


@every_project
def test_a_version_is_written_in_one_place(project, dist):
    folder, described, package = project
    with wheel_of(project, dist) as (_, metadata):
        assert str(metadata.version) == described.get("version", __version__)
    written = [
        path.name
        for path in package.rglob("*.py")
        if re.search(r"^__version__\b.* = [\"']", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert written == (["__init__.py"] if folder == ROOT else [])


@every_plugin
def test_a_plugin_takes_this_core_and_no_incompatible_one(project, dist):
    with wheel_of(project, dist) as (_, metadata):
        (needed,) = (need for need in metadata.requires_dist if need.name == "fedcore-fl")
    version = Version(__version__)
    major, minor = version.major, version.minor
    following = f"0.{minor + 1}.0" if major == 0 else f"{major + 1}.0.0"  # where an interface may change
    assert version in needed.specifier
    assert Version(f"{major}.{minor}.99") in needed.specifier
    assert Version(following) not in needed.specifier
    assert Version("0.0.9") not in needed.specifier
    assert not [need.name for need in metadata.requires_dist if need.url]


def test_an_unpacked_sdist_gives_the_wheel_of_the_working_tree(dist, tmp_path):
    """The wheels under test are built from sdists; here is one that is built from the tree."""
    direct = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    for project in (ROOT, ROOT / "plugins" / "fedcore-fedcd"):
        done = subprocess.run(
            [sys.executable, "-c", direct, tmp_path], cwd=project, capture_output=True, text=True, check=True
        )
        name = done.stdout.split()[-1]
        assert (tmp_path / name).read_bytes() == (dist / name).read_bytes()


def test_every_distribution_has_its_sdist(dist):
    names = {path.name for path in dist.iterdir()}
    assert len(names) == 2 * len(PROJECTS)
    for wheel in (name for name in names if name.endswith(".whl")):
        assert f"{'-'.join(wheel.split('-')[:2])}.tar.gz" in names


def test_sdists_hold_tests_and_licence_and_nothing_that_was_made(dist):
    for path in dist.glob("*.tar.gz"):
        with tarfile.open(path) as archive:
            members = archive.getmembers()
        assert all(member.isfile() for member in members), path.name
        names = {member.name.partition("/")[2] for member in members}
        assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names, path.name
        assert any(name.startswith("tests/test_") or "/test_" in name for name in names), path.name
        assert not [name for name in names if name.startswith(("plugins/", "shared/"))], path.name
        made = re.compile(r"^runs/|(^|/)(\.venv|dist|site|build|\.\w+_cache|__pycache__)/|\.egg-info|\.pyc$")
        assert not [name for name in names if made.search(name)], path.name
