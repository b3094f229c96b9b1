"""What holds for the tests of the core and of every package in plugins/."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

with contextlib.suppress(ImportError):  # not every environment of a package has it
    from hypothesis import HealthCheck, settings

    # Its limits of time fail on a busy machine.
    settings.register_profile("fedcore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("fedcore")

if TYPE_CHECKING:
    from typer.testing import Result

# Configurations name test plugins and data as ``module:tests...``, here and in worker processes.
ROOT = str(Path(__file__).resolve().parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# `make test` runs as many processes as there are cores. Threads of their own would only wait for each other, at twice
# the processor time; runs have one thread anyway, see fedcore.base.process.one_thread.
# Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where this is set, each process that the tests start, and each worker of xdist, would compile all our sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Imports and the collection of tests make millions of objects, none of which is garbage.
gc.disable()
atexit.register(gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that takes over the sentences of errors (tests/sentences.py)."""
    parser.addoption("--update-sentences", action="store_true", help="write the sentences of errors to their file")


def pytest_configure(config: pytest.Config) -> None:
    """Tell tests/sentences.py of the flag."""
    if config.getoption("--update-sentences"):
        os.environ["FEDCORE_UPDATE_SENTENCES"] = "1"


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the parameters of a test marked ``sampled(n)`` as slow, except the first and every n-th after it."""
    seen: Counter[str] = Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % sampled.args[0]:
                item.add_marker("slow")
            seen[test] += 1


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among what was imported and collected."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Let files of this process be written without fsync, which waits for the disk some twenty times in each run.

    It guards against a power failure, which no test makes. tests/storage/test_files.py and
    tests/runs/test_checkpoint.py check that it is called.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Give all runs of a test process one template to fork their workers from; tests/engines/test_local.py does not.

    Commands and runs of sweeps are forked, too. Each of these would import torch, and scikit-learn for FedCD, in
    seconds of processor time.
    """
    from fedcore_testing import forked_workers

    with forked_workers("sklearn.cluster"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once() -> Iterator[None]:
    """Build the tree of commands once, as a process of its own does; typer's runner builds it for each command."""
    from typer import testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Run a command in an empty folder; ``catch_exceptions`` is off, so a traceback fails the test."""
    from typer.testing import CliRunner

    from fedcore.cli.app import app

    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "FEDCORE_DATA"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)

    return invoke


@pytest.fixture
def python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run Python code in a process of its own."""
    environment = {**os.environ, "NO_COLOR": "1"}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)  # noqa: S603

    return run
