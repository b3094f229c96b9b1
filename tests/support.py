"""Short ways to run fedcore with plugins of a test, and to read back what a run left."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedcore import RunConfig
from fedcore.base.process import environment
from fedcore_testing import Quadratic, client_state, committed, federate, model_bytes, name_of, small_config, weights
from fedcore_testing import records as lines
from fedcore_testing.federation import Choice
from fedcore_workers import current

__all__ = [
    "client_state",
    "committed",
    "lines",
    "model_bytes",
    "name_of",
    "weights",
]  # those of fedcore_testing, beside what is defined here


def in_one_test(**cases: Iterable[Any]) -> Callable[[Any], Any]:
    """Return a decorator: one test runs a check on each value of one argument, as a subtest.

    For checks that read files or classes, of which a report names each that fails, as it would with parameters. The
    other arguments are fixtures, which the values share.
    """
    ((argument, values),) = ((name, [*values]) for name, values in cases.items())

    def decorate(test: Any) -> Any:
        def run(subtests: Any, **fixtures: Any) -> None:
            for value in values:
                with subtests.test(value.as_posix() if isinstance(value, Path) else str(value)):
                    test(**{argument: value}, **fixtures)

        others = [each for name, each in inspect.signature(test).parameters.items() if name != argument]
        first = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        functools.update_wrapper(run, test)
        del run.__wrapped__  # pytest would ask it for the arguments
        run.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
        return run

    return decorate


DIGITS = {"clients": 4, "rounds": 1, "model": "auto"}
FEW = 100
"""Training samples per client, two batches, of a run on digits that names no number of samples or steps itself."""
SAYS = {"dataset", "samples", "partition", "batch_size", "local_steps", "public"}
TOY = {
    "dataset": "module:tests.toy.two_centres",
    "model": "module:tests.toy.at_origin",
    "partition": "module:tests.toy.first_and_rest",
    "clients": 2,
    "rounds": 1,
    "local_epochs": 2,
    "batch_size": 8,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
}

CORRECTED = {name: {"per_class": 4, "epochs": 1} for name in ("ccvr", "uscc", "fedeccr")}
"""Short corrections of the classifier, for tests that do not look at what these make of it."""


def brief(name: str) -> Choice:
    """Return a plugin's name with options that make its correction short, where it has one."""
    return name, CORRECTED.get(name, {})


def config(tmp_path: Path, *plugins: Choice, **options) -> RunConfig:
    """Return the configuration of a small run on digits."""
    return small_config(tmp_path, *plugins, **defaults(options))


def defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a small run, in which ``options`` come first; ``samples=None`` takes all of digits."""
    given = {**DIGITS, **options}
    if not SAYS & {*options} and given["clients"] < 12:
        return {**given, "samples": FEW * given["clients"]}
    return {name: value for name, value in given.items() if (name, value) != ("samples", None)}


def run(tmp_path: Path, *plugins: Choice, notify=None, **options):
    """Run on digits."""
    return federate(tmp_path, *plugins, notify=notify, **defaults(options))


def run_toy(tmp_path: Path, *plugins, **options):
    """Run the TOY; its quadratic task loss comes with it."""
    return run(tmp_path, Quadratic, *plugins, **{**TOY, **options})


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    """Return the bytes with one bit the other way round."""
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def run_code(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own that has imported what a worker imports; ``more`` is its environment."""
    given, server = environment(**more), current()
    if server is None:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given, check=False)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        outputs = {1: out.fileno(), 2: errors.fileno()}
        ended = server.fork(f"{__name__}:execute", [code], environment=given, descriptors=outputs).wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([], ended, out.read(), errors.read())


def execute(code: str) -> None:
    """Be a script, in a forked process."""
    exec(code, {"__name__": "__main__"})  # noqa: S102 - a test's own
