"""Packages and examples import the public names of fedcore and nothing else of it."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedcore
from fedcore.tools import digest
from fedcore_testing import federate
from tests.sentences import raises
from tests.support import in_one_test, run_code

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "python.md"

SURFACE = {
    "fedcore": "a method: hooks, plugins and their options, what hooks see and exchange, errors, runs",
    "fedcore_functional": "what methods share: mathematics, and parts of plugins",
    "fedcore.data": "data sets, samples, partitions",
    "fedcore.models": "models by name, and the device that they run on",
    "fedcore.engines": "an engine: its protocol, what travels, a worker's runtime",
    "fedcore.client": "a runner: trainings and their steps; what a step's hooks read",
    "fedcore.hooks": "plugins as tools see them: hooks, declarations, checks",
    "fedcore.server": "the server's side of an engine: federations, rounds, state",
    "fedcore.cli": "the command line, and a package's command",
    "fedcore.tools": "tools: reading and comparing runs, commands, names, files",
    "fedcore_zoo": "data sets, partitions and networks of the papers, their layers, a fixed split, torchvision",
    "fedcore_console": "what commands and displays share",
    "fedcore_study": "studies of many runs: sweep, compare",
    "fedcore_study.tools": "what draws, prints or repeats studies: records, comparisons, tables, sweeps",
    "fedcore_report": "reports, and curves as pictures",
    "fedcore_workers": "worker processes, and the template that they are forked from",
    "fedcore_accelerate": "runners, and the values that a step's hooks read",
    "fedcore_testing": "tests of all these",
    "fedcore_tasks": "tasks: labels other than one class for each sample, and figures of tasks",
    "fedcore_trackers": "a tracker: its base class, and a round's values as scalars",
}
"""Module: what it is for. What it offers is its ``__all__``."""

PACKAGES = sorted(path for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").is_file())


def imports(folder: Path, of: str = r"fedcore(\.|$)") -> Iterator[tuple[str, str, str]]:
    """Yield (where, module, name) for each import from fedcore below a folder; no name for ``import module``.

    :param of: pattern at which the names of the modules begin.
    """
    for file in sorted(folder.rglob("*.py")):
        where = file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            else:
                continue
            yield from ((f"{where}:{node.lineno}", *one) for one in found if re.match(of, one[0]))


def offers(module: str, name: str) -> bool:
    """Return whether an import takes a public name, or a module of the surface."""
    if module in SURFACE and name in importlib.import_module(module).__all__:
        return True
    return (f"{module}.{name}" if name else module) in SURFACE


@in_one_test(folder=[*PACKAGES, ROOT / "examples"])
def test_only_public_names_are_imported(folder: Path) -> None:
    wrong = [
        f"{where}: {name} of {module}" if name else f"{where}: {module}"
        for where, module, name in imports(folder)
        if not offers(module, name)
    ]
    assert not wrong, "not public, see docs/reference/python.md:\n" + "\n".join(wrong)


SHARED = (
    "fedcore_accelerate",
    "fedcore_console",
    "fedcore_functional",
    "fedcore_report",
    "fedcore_study",
    "fedcore_study.tools",
    "fedcore_tasks",
    "fedcore_testing",
    "fedcore_workers",
    "fedcore_zoo",
)
"""Packages whose public names other packages may import."""


def test_no_package_imports_another() -> None:
    wrong = [
        f"{where}: {module}"
        for folder in PACKAGES
        for where, module, name in imports(folder / "src", r"fedcore_")
        if module.partition(".")[0] != folder.name.replace("-", "_")
        if not (module in SHARED and offers(module, name))
    ]
    assert not wrong, "packages share by fedcore-functional, or not at all:\n" + "\n".join(wrong)


def test_import_linter_knows_every_package_and_no_exception() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    roots = ["fedcore", *(folder.name.replace("-", "_") for folder in PACKAGES)]
    assert settings["root_packages"] == roots
    (contract,) = (each for each in settings["contracts"] if each["type"] == "protected")
    assert contract["allowed_importers"] == ["fedcore"]


def test_every_name_has_one_import_path() -> None:
    homes: dict[str, list[str]] = {}
    for module in SURFACE:
        for name in importlib.import_module(module).__all__:
            homes.setdefault(name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


@in_one_test(module=SURFACE)
def test_every_name_is_there(module: str) -> None:
    offered = importlib.import_module(module)
    assert len(offered.__all__) == len(set(offered.__all__))
    assert not [name for name in offered.__all__ if not hasattr(offered, name)]


@pytest.mark.parametrize(
    "module",
    ["fedcore", "fedcore.tools", "fedcore_console", "fedcore_report", "fedcore_study", "fedcore_testing"],
)
def test_completion_offers_names_that_are_imported_on_first_use(module: str) -> None:
    offered = run_code(f"import {module}; print(*dir({module}))").stdout.split()
    assert offered == sorted(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", ["fedcore", "fedcore.tools"])
def test_names_that_are_not_there_are_refused(module: str) -> None:
    with raises(AttributeError, module, "no_such_name"):
        importlib.import_module(module).no_such_name  # noqa: B018 - looked up on purpose


def test_a_tool_that_reads_runs_imports_no_torch(tmp_path: Path) -> None:
    result = federate(tmp_path, rounds=1)
    read = f"""
import sys
from pathlib import Path
import fedcore.tools
assert [name for name in sys.modules if name.startswith("fedcore.") and name.count(".") > 1] == ["fedcore.base.lazy"]
from fedcore.tools import PROTOCOLS, RunFiles, digest, method, options, output, rounds
files = RunFiles.open(Path({str(result.directory)!r}))
assert not files.how_to_resume.startswith("in Python")
(record,), (session,) = files.metrics.read(), files.sessions.read()
config, summary = files.read_config(), files.read_summary()
print(digest(config), method(config.plugins), summary["metrics"]["global"]["accuracy"], PROTOCOLS["global"].heading)
print(rounds.lost(record).total(), rounds.seconds(record) > 0, session["versions"]["fedcore"])
assert "torch" not in sys.modules
"""
    accuracy = result.metrics["global"]["accuracy"]
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{digest(result.config)} fedavg {accuracy} global model on the test set",
        f"0 True {fedcore.__version__}",
    ]


def test_the_page_lists_the_surface() -> None:
    rows = dict(re.findall(r"^\| `(fedcore[\w.]*)` \|.*?\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    listed = {module: re.findall(r"`(\w+)`", names) for module, names in rows.items()}
    expected = {
        module: [name for name in importlib.import_module(module).__all__ if not name.startswith("_")]
        for module in SURFACE
    }
    assert listed == {module: sorted(names, key=str.lower) for module, names in expected.items()}
