"""One virtual environment per peer, made from its pinned requirements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHONS = {"blazefl": ("python3.14t", "python3.14")}
"""Peer -> the Pythons that it runs on, the best first (with "t": without a GIL); by default the one that runs this."""
_INSTALLED = """
import importlib.metadata as m, json
print(json.dumps([(found.metadata["Name"], found.version) for found in m.distributions()]))
"""


class EnvironmentFailed(Exception):
    """An environment could not be made; the message says why."""


def pins(requirements: Path) -> dict[str, str]:
    """Return the version of each package in a requirements file of ``name==version`` lines."""
    lines = (line.partition("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {_normal(name): version for name, version in pairs}


def python_of(peer: str, folder: Path, requirements: Path = HERE / "requirements") -> Path:
    """Return the interpreter of a peer's environment, which is made, or completed, where that is needed.

    :param requirements: the folder with ``PEER.txt``.
    :raises EnvironmentFailed: venv or pip failed, or there is no Python that the peer runs on.
    """
    environment, requirements = folder / peer, requirements / f"{peer}.txt"
    python = environment / "bin" / "python"
    if not python.exists():
        _run([_interpreter(peer), "-m", "venv", str(environment)], f"environment {environment}")
    if missing(python, requirements):
        _run([str(python), "-m", "pip", "install", "-q", "-r", str(requirements)], f"packages of {peer}")
        if wrong := missing(python, requirements):
            raise EnvironmentFailed(f"{environment} does not have {', '.join(wrong)}; delete it and run again")
    return python


def missing(python: Path, requirements: Path) -> list[str]:
    """Return the pins that an environment does not have; a local version such as 2.13.0+cpu is 2.13.0."""
    answer = subprocess.run([str(python), "-c", _INSTALLED], capture_output=True, text=True)  # noqa: S603 - our own words
    if answer.returncode:
        raise EnvironmentFailed(f"{python} does not run: {answer.stderr.strip()}")
    found = {_normal(name): version for name, version in json.loads(answer.stdout)}
    wanted = pins(requirements)
    return [f"{name}=={version}" for name, version in wanted.items() if found.get(name, "").split("+")[0] != version]


def _interpreter(peer: str) -> str:
    """Return the Python to make a peer's environment with, from PATH or from beside this one."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    names = PYTHONS.get(peer, (sys.executable,))
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    raise EnvironmentFailed(
        f"it needs {' or '.join(names)} on PATH; install one of them, or leave {peer} out with --peer"
    )


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _run(command: list[str], what: str) -> None:
    print(f"making {what} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - our own words
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise EnvironmentFailed(f"{what}: exit {done.returncode}: {tail}")
