"""A new package installs with pip, passes its own tests at once, and trains; what cannot be one is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest

from fedcore import __version__
from fedcore.tools import process
from fedcore_testing.scaffold import KINDS
from tests.sentences import refused
from tests.support import run_code

FLAGS = {
    "method": "--plugin",
    "dataset": "--dataset",
    "model": "--model",
    "partitioner": "--partition",
    "tracker": "--tracker",
    "engine": "--engine",
}


@pytest.fixture
def new(cli):
    return lambda *arguments: cli("plugins", "new", *arguments)


def python(folder, *arguments, path):
    """Run ``python -m ...`` as if the packages in ``path`` were installed."""
    environment = {**os.environ, "PYTHONPATH": str(path), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(package, spec):
    python(package, "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", spec, package, path="")
    return spec


def known(package):
    """Write the metadata that lets fedcore find a package where it stands, in less time than pip takes."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    ((name, target),) = points.items()
    metadata = package / "src" / "fedcore_my_own-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    return package / "src"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_installs_passes_its_tests_and_trains(new, tmp_path, kind):
    assert new("my-own", "--kind", kind).exit_code == 0
    spec = installed(tmp_path / "fedcore-my-own", tmp_path / "site")
    own_tests(tmp_path / "fedcore-my-own", spec)
    empty = tmp_path / "empty"
    empty.mkdir()
    python(empty, "fedcore", "train", FLAGS[kind], "my-own", "--rounds", 1, "--workers", 0, "--quiet", path=spec)
    assert list((empty / "runs").glob("*/summary.json"))


def test_the_files_of_a_new_method_are_listed_and_how_to_test_them(new):
    result = new("my-own")
    for line in ("fedcore-my-own", "  pyproject.toml", "  README.md", "  src/fedcore_my_own/__init__.py"):
        assert line in result.output.splitlines()
    assert '  pytest fedcore-my-own -m "not slow"' in result.output.splitlines()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "method" else pytest.mark.slow) for kind in KINDS]
)
def test_a_new_package_can_be_imported_and_passes_its_own_tests(new, tmp_path, kind):
    assert new("my-own", "--kind", kind).exit_code == 0
    package = tmp_path / "fedcore-my-own"
    own_tests(package, known(package), *(["-k", "learns"] if kind == "method" else []))


def test_the_test_of_a_new_method_knows_nothing_of_the_templates_option(new, tmp_path):
    assert new("my-own").exit_code == 0
    (tests,) = (tmp_path / "fedcore-my-own" / "tests").glob("test_*.py")
    source = (tmp_path / "fedcore-my-own" / "src" / "fedcore_my_own" / "__init__.py").read_text()
    options = re.findall(r"^    (\w+): .* = Field\(", source, re.MULTILINE)
    assert options
    assert not [option for option in options if option in tests.read_text()]


@pytest.mark.slow
def test_the_whole_kit_passes_on_a_new_method(new, tmp_path):
    assert new("my-own").exit_code == 0
    spec = installed(tmp_path / "fedcore-my-own", tmp_path / "site")
    own_tests(tmp_path / "fedcore-my-own", spec)
    told = python(tmp_path, "fedcore", "plugins", "check", "my-own", path=spec)
    assert "my-own keeps the contract" in told
    assert "passed  check_package_is_complete" in told
    (metadata,) = spec.glob("*.dist-info/METADATA")
    changed, count = re.subn(
        r"^Requires-Dist: fedcore-fl\b", "Requires-Dist: fedcore", metadata.read_text(), flags=re.M
    )
    assert count == 1
    metadata.write_text(changed)
    with pytest.raises(AssertionError, match=r"which versions of fedcore-fl .* requires \['fedcore<"):
        python(tmp_path, "fedcore", "plugins", "check", "my-own", "--only", "check_package_is_complete", path=spec)


def own_tests(package, spec, *options):
    """Run a package's own tests: no failure, no warning."""
    arguments = ["-q", "-p", "no:cacheprovider", "-W", "error", *options]
    code = f"import os, sys, pytest; os.chdir({str(package)!r}); sys.exit(pytest.main({arguments!r}))"
    done = run_code(code, PYTHONPATH=os.pathsep.join([str(spec), process.environment()["PYTHONPATH"]]), NO_COLOR="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_whole(new, tmp_path, kind):
    assert new("deep-pull-2", "--kind", kind, "--into", str(tmp_path / "some" / "where")).exit_code == 0
    package = tmp_path / "some" / "where" / "fedcore-deep-pull-2"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == "fedcore-deep-pull-2"
    major, minor = map(int, __version__.split(".")[:2])
    also = {"method": ["fedcore-functional"], "tracker": ["fedcore-trackers"], "engine": ["fedcore-workers"]}
    assert project["dependencies"] == [
        f"{needed}>={major}.{minor},<0.{minor + 1}" for needed in ["fedcore-fl", *also.get(kind, [])]
    ]
    (points,) = project["entry-points"].values()
    (target,) = points.values()
    module, _, attribute = target.partition(":")
    source = (package / "src" / module / "__init__.py").read_text()
    assert re.search(rf"^(class|def) {attribute}\b", source, re.MULTILINE)
    files = [path for path in package.rglob("*") if path.is_file()]
    assert all("$" not in path.read_text() and "$" not in path.name for path in files)
    ruff = ["ruff", "check", "--select", "E,F,I,B,UP,D1", "--line-length", "120"]
    python(package, *ruff, "--per-file-ignores", "tests/*:D1", ".", path="")
    python(package, "ruff", "format", "--check", "--line-length", "120", ".", path="")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_typed(new, tmp_path, kind):
    assert new("own", "--kind", kind).exit_code == 0
    python(tmp_path / "fedcore-own", "mypy", "--strict", "src/fedcore_own", path="")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["My_Method"], "'my-method'"),
        (["Scaffold2"], "'scaffold2'"),
        (["2fast"], "'fast'"),
        (["a--b"], "'a-b'"),
        (["../up"], "'up'"),
        (["x" * 51], 50),
        (["fedcore-new"], "'new'"),
        (["fedprox"], "'fedprox'"),
        (["scaffold"], "'scaffold'"),
        (["digits", "--kind", "dataset"], "'digits'"),
        (["wandb", "--kind", "tracker"], "'wandb'"),
        (["local", "--kind", "engine"], "'local'"),
        (["ray", "--kind", "engine"], "'ray'"),
        (["graph", "--kind", "dataset"], "'fedcore-graph'"),
        (["fl"], "'fedcore-fl'"),
        (["client-site", "--kind", "engine"], "'client-site'"),
        (["place", "--kind", "engine"], "'place'"),
        (["plugin"], "'plugin'"),
        (["lambda", "--kind", "model"], "'lambda'"),
        (["torch", "--kind", "dataset"], "'torch'"),
        (["fine", "--kind", "methd"], "'method'"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_bad_names_are_refused(new, tmp_path, arguments, named):
    refused(new(*arguments), named)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(new, tmp_path):
    (tmp_path / "fedcore-mine").mkdir()
    result = new("mine")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert list((tmp_path / "fedcore-mine").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(new, tmp_path):
    (tmp_path / "file").write_text("")
    result = new("mine", "--into", "file")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
