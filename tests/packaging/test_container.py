"""The Dockerfile: what it copies is there, and its steps make an environment that trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def steps() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, continued lines joined, comments left out."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    return re.findall(r"^([A-Z]+) +(.*)$", lines.replace("\\\n", " "), re.MULTILINE)


def test_it_has_one_base_with_a_version_and_does_not_run_as_root():
    found = steps()
    assert [arguments for name, arguments in found if name == "FROM"] == ["python:${PYTHON}-slim"]
    assert ("ARG", "PYTHON=3.11") in found
    assert [arguments for name, arguments in found if name == "USER"] == ["1000"]
    assert found[-2:] == [("ENTRYPOINT", '["fedcore"]'), ("CMD", '["--help"]')]


def test_every_build_argument_is_an_option_of_the_installer():
    options = (ROOT / "tools" / "install.py").read_text(encoding="utf-8")
    (command,) = [arguments for name, arguments in steps() if name == "RUN" and "install.py" in arguments]
    for flag in re.findall(r"--[\w-]+", command):
        assert f'"{flag}"' in options
    assert set(re.findall(r"\$\{(\w+)\}", command)) == {"TORCH", "TORCH_INDEX"}


@pytest.mark.slow
def test_its_steps_make_an_environment_that_trains(tmp_path):
    """In a copy of what COPY takes, with /opt in a folder of the test; for users and folders the image is needed.

    With torch for CUDA; TORCH=cpu, and where it is needed TORCH_INDEX, in the environment are the build's arguments.
    """
    here = {"/opt/venv": tmp_path / "venv", "/opt/fedcore": tmp_path / "fedcore"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ignored = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"}
    for file in listed.splitlines():
        if file.partition("/")[0] not in ignored and (ROOT / file).is_file():
            (here["/opt/fedcore"] / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, here["/opt/fedcore"] / file)
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"TORCH": os.environ.get("TORCH", "default"), "TORCH_INDEX": os.environ.get("TORCH_INDEX", "")}
    for command in [arguments for name, arguments in steps() if name == "RUN" and "useradd" not in arguments]:
        for path, replaced in here.items():
            command = command.replace(path, str(replaced))
        subprocess.run(["bash", "-ceu", command], cwd=here["/opt/fedcore"], env=environment, check=True)
    program = here["/opt/venv"] / "bin" / "fedcore"
    train = [
        program,
        "train",
        "--plugin",
        "moon",
        "--rounds",
        "1",
        "--clients",
        "2",
        "--quiet",
        "--out",
        tmp_path / "run",
    ]
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.safetensors").is_file()
    names = subprocess.run(
        [here["/opt/venv"] / "bin" / "pip", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "fedcore-study" in names
    report = subprocess.run([program, "report", "run", "--points", "0"], cwd=tmp_path, env=environment, check=False)
    assert report.returncode == 0
    assert not re.search(r"^(pytest|mypy|ruff|ray|mlflow)", names, re.MULTILINE)
