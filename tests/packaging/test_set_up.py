"""make setup: what tools/install.py installs, by uv and by pip."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(install, monkeypatch):
    """Record the commands in place of running them; those whose program is in ``failing`` fail."""
    ran = SimpleNamespace(all=[], failing=set())

    def run(command, **options):
        ran.all.append(command)
        code = int(bool({Path(command[0]).name, command[2]} & ran.failing))
        return subprocess.CompletedProcess(command, code, stdout="", stderr="no route to the index" * code)

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install.shutil, "which", lambda name: "/somewhere/uv" if name == "uv" else None)
    monkeypatch.setattr(sys, "argv", ["install.py"])
    return ran


def installs(commands):
    return [command for command in commands.all if "install" in command]


def test_every_package_is_installed_flower_without_its_requirements(install):
    build, everything, alone = install.requirements("dev")
    assert build == ["hatchling", "editables"]
    assert f"{ROOT}[dev]" in everything
    found = {Path(word).name for word in [*everything, *alone] if "/plugins/" in word}
    assert found == {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert alone[0] == "--no-deps"
    assert "fedcore-flower" in alone[-1]


def test_profile_core_and_the_extra_all_leave_out_the_packages_that_docs_install_names(install):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    expected = packages - {"fedcore-dp", "fedcore-flower", "fedcore-graph", "fedcore-huggingface", "fedcore-ray"}
    _, everything = install.requirements("core")
    assert everything[:2] == ["-e", str(ROOT)]  # no development tools
    assert {Path(word).name for word in everything[2:] if word != "-e"} == expected
    assert set(project["optional-dependencies"]["all"]) == expected
    assert all(f"`{left_out}`" in page for left_out in packages - expected)


def test_extras_are_those_of_fedcore(install):
    for profile, expected in (("core", "[report,onnx]"), ("dev", "[dev,report,onnx]")):
        _, everything, *_ = install.requirements(profile, ["report", "onnx"])
        assert f"{ROOT}{expected}" in everything


def test_uv_takes_the_pinned_versions_and_compiles_once(install, commands):
    assert install.main() == 0
    for command in installs(commands):
        assert command[:3] == ["/somewhere/uv", "pip", "install"]
        assert {"--compile-bytecode", str(ROOT / "constraints.txt")} <= set(command)
    assert len(installs(commands)) == 3


def test_pip_takes_over_without_a_word_where_uv_fails(install, commands, capsys):
    commands.failing.add("uv")
    assert install.main() == 0
    assert [command[1:4] for command in installs(commands)[1:]] == [["-m", "pip", "install"]] * 3
    assert "compileall" in [command[2] for command in commands.all]
    assert capsys.readouterr() == ("", "")


def test_where_both_fail_the_reason_of_uv_is_printed(install, commands, capsys):
    commands.failing |= {"uv", "pip"}
    assert install.main() == 1
    assert "no route to the index" in capsys.readouterr().err


@pytest.mark.parametrize("fetched", [True, False])
def test_uv_is_fetched_by_pip_where_it_is_not_on_the_path(install, commands, monkeypatch, fetched):
    own = Path(sys.executable).with_name("uv")
    state = iter([None, None, own if fetched else None])  # on PATH, in the environment, and after pip
    monkeypatch.setattr(install.shutil, "which", lambda name: next(state))
    assert install.find_uv() == (own if fetched else None)
    assert commands.all[0][-1] == "uv"


def test_torch_for_the_cpu(install, commands, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["install.py", "--torch", "cpu"])
    assert install.main() == 0
    assert all(command[command.index("--torch-backend") + 1] == "cpu" for command in installs(commands))
    commands.all.clear()
    monkeypatch.setattr(sys, "argv", ["install.py", "--torch", "cpu", "--torch-index", str(tmp_path)])
    assert install.main() == 0
    assert all(command[command.index("--find-links") + 1] == str(tmp_path) for command in installs(commands))


def fake_torchvision(folder, torch, code):
    """Write packages torch and torchvision of some version, of which the latter runs some code when it is imported."""
    for name, version in (("torch", torch), ("torchvision", "0.28.0")):
        (folder / f"{name}-{version}.dist-info").mkdir()
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / "torchvision.py").write_text(code)


def test_a_torchvision_of_another_torch_is_noted_at_the_end(install, monkeypatch, tmp_path):
    fake_torchvision(tmp_path, "2.13.0+cpu", "raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    noted = next(iter(install.misfits()))
    assert noted.startswith(
        "torchvision 0.28.0 next to torch 2.13.0+cpu cannot be imported "
        "(RuntimeError: operator torchvision::nms does not exist). "
    )
    assert "make clean, then make setup TORCH=cpu" in noted


def test_broken_requirements_are_noted_but_not_flowers(install, monkeypatch, capsys):
    """Which is installed without them. The notes fail no set-up."""

    def run(command, **options):
        lines = [
            "fedcore-flower 0.1.0 requires flwr, which is not installed.",
            "moon 1 requires sun<2, but sun 2 is here.",
        ]
        checks = command[2:] == ["pip", "check"]
        return subprocess.CompletedProcess(command, int(checks), stdout="\n".join(lines) * checks, stderr="")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["install.py"])
    assert install.main() == 0
    printed = capsys.readouterr().err
    assert printed.startswith("note: moon 1 requires sun<2, but sun 2 is here. Remedy: make clean, then make setup")
    assert "flwr" not in printed


@pytest.mark.slow
def test_what_fits_is_not_spoken_of(install, monkeypatch, tmp_path):
    fake_torchvision(tmp_path, "2.13.0", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not [misfit for misfit in install.misfits() if "torchvision" in misfit]


def test_pip_needs_an_index_for_torch_without_cuda(install, commands, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["install.py", "--torch", "cpu"])
    commands.failing.add("uv")
    assert install.main() == 2
    assert "TORCH_INDEX=ADDRESS" in capsys.readouterr().err


def test_uv_uses_the_indexes_that_pip_is_configured_for(install, monkeypatch):
    listed = """:env:.find-links='/wheels /more'
global.extra-index-url='file:///one file:///two'
global.find-links='/old'
install.no-index='true'
freeze.timeout='10'
"""
    monkeypatch.setattr(
        install.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=listed, stderr="")
    )
    assert install.uv_environment(install.pip_options()) == {
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_INDEX": "true",
    }


def test_the_core_requires_nothing_that_it_does_not_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.match(r"[\w-]+", need)[0].lower() for need in project["dependencies"]}
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "fedcore").rglob("*.py")))
    named = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
    imported = set(re.findall(r"\b(?:import |from |import_module\(\")(\w+)", source))
    assert required <= {named.get(name, name) for name in imported}
