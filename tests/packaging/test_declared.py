"""A package of plugins/ declares what it imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import in_one_test

ROOT = Path(__file__).parents[2]
PLUGINS = sorted((ROOT / "plugins").iterdir())
BROUGHT = {"torch", "numpy", "pydantic", "typer", "rich", "safetensors", "pyyaml", "pluggy"}
"""What fedcore's public names are made of: a package has these from fedcore."""


def declared(project: dict, *, extras: bool = True) -> set[str]:
    """Return the names of the distributions that a project requires, itself or through an extra."""
    needed = list(project["dependencies"])
    needed += [need for needs in project.get("optional-dependencies", {}).values() for need in needs] * extras
    return {canonicalize_name(Requirement(need).name) for need in needed}


@cache
def imported(source: Path) -> set[str]:
    """Return the top-level modules outside the standard library that a folder's files import, anywhere in them."""
    found: set[str] = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


@cache
def distributions() -> dict[str, list[str]]:
    """Return the distributions of each module, with the core's, which an editable install does not name."""
    return {**packages_distributions(), "fedcore": ["fedcore-fl"]}


def read(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


every_package = in_one_test(folder=PLUGINS)


@every_package
def test_a_package_declares_what_it_imports(folder):
    known = BROUGHT | declared(read(folder)) | {folder.name}
    providers = distributions()
    undeclared = {
        module
        for module in imported(folder / "src")
        if not {canonicalize_name(name) for name in providers.get(module, [module])} & known
    }
    assert not undeclared, f"{folder.name} imports {undeclared} and does not declare them"


@every_package
def test_a_package_requires_fedcore_and_no_part_of_it_that_it_does_not_import(folder):
    project = read(folder)
    needs = declared(project, extras=False)
    assert "fedcore-fl" in needs
    assert {need for need in needs if need.startswith("fedcore-")} - {"fedcore-fl"} <= {
        module.replace("_", "-") for module in imported(folder / "src")
    }


@every_package
def test_a_method_requires_no_library_of_weight(folder):
    project = read(folder)
    needs = declared(project, extras=False)
    if (
        set(project.get("entry-points", {})) & {"fedcore.plugins", "fedcore.partitioners"}
        and folder.name != "fedcore-zoo"
    ):
        own = {"fedcore-dp": {"dp-accounting"}, "fedcore-fedcd": {"scikit-learn", "scipy"}}  # its accountant; k-means
        assert {need for need in needs if not need.startswith("fedcore")} == own.get(folder.name, set())
    elif folder.name != "fedcore-zoo":
        assert not {"torch", "torchvision"} & needs


@in_one_test(folder=[ROOT, *PLUGINS])
def test_nobody_is_told_to_install_the_other_project_s_fedcore(folder):
    assert "fedcore" not in declared(read(folder))
    files = [path for path in folder.iterdir() if path.is_file()] if folder == ROOT else folder.rglob("*")
    if folder == ROOT:
        files += [
            path for name in ("docs", "examples", "fedcore", "tools", ".github") for path in (ROOT / name).rglob("*")
        ]
    bare = re.compile(r"pip install[^\n|`]*[ '\"]fedcore(?![\w./-])")
    told = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.suffix in {".md", ".py", ".ipynb", ".toml", ".tmpl", ".yml", ""} and path.is_file()
        for match in bare.finditer(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert not told


def test_fedcore_brings_what_packages_have_from_it():
    project = read(ROOT)
    assert declared(project, extras=False) >= BROUGHT
