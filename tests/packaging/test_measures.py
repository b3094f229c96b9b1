"""tools/measures.py: the limit of the core's size, what hooks load, and an interpreter without fedcore."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sentences import raises

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measures(monkeypatch, tmp_path):
    """The tool, with a core of three lines of code in place of fedcore/."""
    spec = importlib.util.spec_from_file_location("measures", ROOT / "tools" / "measures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "part.py").write_text('"""A\nB"""\n\nimport os\n\n# C\nx = (\n    1,  # D\n)\n')
    monkeypatch.setattr(module, "CORE", tmp_path)
    return module


def test_a_line_too_many_is_refused(measures, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measures.py", "--most", "2"])
    with raises(SystemExit, "3", "1", "2", "most-lines"):
        measures.main()


def test_a_core_of_the_limit_passes_and_a_smaller_one_asks_for_a_lower_limit(measures, monkeypatch, capsys):
    for most, printed in (("3", ""), ("4", "fedcore/ has 3 lines of code, fewer than 4, the limit: lower most-lines")):
        monkeypatch.setattr(sys, "argv", ["measures.py", "--most", most])
        measures.main()
        assert capsys.readouterr().out.startswith(printed)


def test_lint_checks_the_limit_of_the_project(measures, monkeypatch, capsys):
    recipe = re.search(r"^lint: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "\t$(BIN)/python tools/measures.py --most\n" in recipe[1]
    (limit,) = re.findall(r"^most-lines = (\d+)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    monkeypatch.setattr(sys, "argv", ["measures.py", "--most"])
    measures.main()
    assert f"fewer than {int(limit):,}, the limit" in capsys.readouterr().out


@pytest.mark.slow
def test_hooks_load_base_alone(measures):
    loaded = {name.split(".")[1] for name in measures.imported("import fedcore.hooks.hookspecs") if "." in name}
    assert loaded == {"base", "hooks"}


def test_an_interpreter_without_fedcore_is_told_which_one_to_use(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    command = [tmp_path / "bare" / "bin" / "python", ROOT / "tools" / "measures.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "lines of code in fedcore/" in done.stdout
    assert "Traceback" not in done.stderr
    assert "No module named 'fedcore'" in done.stderr
    assert ".venv/bin/python tools/measures.py" in done.stderr


def test_functions_that_hold_the_whole_configuration_are_counted(measures, tmp_path):
    (tmp_path / "base" / "part.py").write_text(
        "def whole(config: RunConfig): ...\n"
        "def narrow(options: DataOptions): ...\n"
        "def reads(site): return site.config.lr\n"
        "def hands_on_a_section(site): return narrow(site.config)\n"
        "def names_a_section(site): options: DataOptions = site.config\n"
        "def hands_on(site): return whole(site.config)\n"
        "def names(site): config = site.config\n"
        "class Narrow:\n    def __init__(self, options: DataOptions): self.options = options\n"
        "def makes(site): return Narrow(site.config)\n"
    )
    assert measures.holders() == ["whole", "hands_on", "names"]
