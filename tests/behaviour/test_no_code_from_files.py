"""No source of ours reads files in ways that can run code, or evaluates text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in (ROOT / "fedcore", *ROOT.glob("plugins/*/src")) for path in folder.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "pickletools"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "execfile", "os.system", "os.popen"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"),
    *("pandas.read_pickle", "pd.read_pickle", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"),
}
IMPORTS_BY_NAME = {
    "plugins/fedcore-workers/src/fedcore_workers/forks.py",
    "plugins/fedcore-flower/src/fedcore_flower/child.py",
}
"""Where import_module is called, beside registry.py, which imports what a user may name: these have names of their
own, or of the program that started them."""

UNPICKLES = {
    "fedcore/base/lazy.py": ["__import__"],
    "fedcore/base/registry.py": ["importlib.import_module"],
    "fedcore/base/safe_yaml.py": ["yaml.load"],
    "plugins/fedcore-study/src/fedcore_study/runs/overview.py": ["yaml.load"],
    "plugins/fedcore-workers/src/fedcore_workers/objects.py": ["import pickle", "import cloudpickle"],
    "plugins/fedcore-zoo/src/fedcore_zoo/kept.py": ["import pickle"],
}
"""A worker process unpickles the objects that the program which started the run gave to it. The bytes come through the
connection to that program's engine, or from Ray, never from a run directory or another file; Flower's clients take
none. registry.py imports what a user may name. safe_yaml.py loads with a loader that makes values of JSON's types
alone. overview.py, which reads thousands of configurations, loads with PyYAML's safe loader in C. kept.py compares the
content of objects by their pickles, and loads none."""


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {item.name}" for item in node.names if item.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            by_literal = (
                name.endswith("import_module") and len(node.args) == 1 and isinstance(node.args[0], ast.Constant)
            )
            if name in CALLS or (name.endswith("import_module") and not by_literal):
                yield name
            if name.endswith("torch.load") and name != "safetensors.torch.load" and given.get("weights_only") != "True":
                yield "torch.load without weights_only=True"
            if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
                yield "np.load with allow_pickle"
            if given.get("shell", "False") != "False":
                yield "shell=True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f, Loader)",
        "eval(text)",
        "importlib.import_module(name)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_each_way_is_found(source: str) -> None:
    assert list(findings(source))


def test_what_is_safe_is_not() -> None:
    assert not list(
        findings(
            "import_module('pandas'); model.eval(); torch.load(f, weights_only=True); np.load(f); yaml.safe_load(f)"
        )
    )


def test_no_file_reaches_what_workers_unpickle() -> None:
    """Only engines take objects, where they start a worker's runtime."""
    callers = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for text in [path.read_text(encoding="utf-8")]
        if re.search(r"\b(unpack_site\(|unpickled\(|pickle\.loads?\(|pickle\.Unpickler)", text)
    }
    assert callers == {
        "plugins/fedcore-ray/src/fedcore_ray/host.py",
        "plugins/fedcore-study/src/fedcore_study/sweeps/child.py",
        "plugins/fedcore-workers/src/fedcore_workers/messages.py",
        "plugins/fedcore-workers/src/fedcore_workers/objects.py",
        "plugins/fedcore-workers/src/fedcore_workers/worker.py",
    }


def test_no_source_runs_code_from_files() -> None:
    assert len(SOURCES) > 150
    found = {str(path.relative_to(ROOT)): list(findings(path.read_text(encoding="utf-8"))) for path in SOURCES}
    found = {path: what for path, what in found.items() if what}
    assert {path: found.pop(path, None) for path in UNPICKLES} == UNPICKLES
    assert set(found) == IMPORTS_BY_NAME, found
    assert all(name.endswith("import_module") for what in found.values() for name in what), found
