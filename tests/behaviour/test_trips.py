"""Which files a value enters on its way through the core: a batch, an update, the learning rate.

A file counts where one of its functions receives, makes or returns the value itself, alone or in a tuple, list or
mapping. A reader follows a value through these files, so each further one is a decision, made here.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcore
from fedcore.cli import main
from fedcore.runs.checkpoint import CheckpointStore

CORE = f"{Path(fedcore.__file__).parent}/"
RATE, BATCH, STEPS = 0.0123456789, 13, 4
COMMAND = (
    "fedcore train --dataset digits --model simple-cnn --partition iid --clients 1 --samples 40 --rounds 1 "
    f"--local-epochs 1 --batch-size {BATCH} --lr {RATE} --workers 0 --device cpu --quiet"
)


class Trip:
    """Notes the files that a value enters between :meth:`begin` and :meth:`end`; attributes of objects do not count."""

    def __init__(self, is_value: Callable[[Any], bool]) -> None:
        self.files: dict[str, set[str]] = {}
        self._is_value, self._looking = is_value, threading.local()

    def begin(self, is_value: Callable[[Any], bool] | None = None) -> None:
        """Start to look, for another value if one is given."""
        self._is_value = is_value or self._is_value
        sys.setprofile(self.look)

    def end(self) -> None:
        """Stop looking: the rest of a run makes a million calls."""
        sys.setprofile(None)

    def look(self, frame: Any, event: str, returned: Any) -> None:
        """Note a call or return of a core function that holds the value; for sys.setprofile."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(CORE):
            return
        if code.co_name == "__setattr__":  # the value becomes an attribute
            return
        if getattr(self._looking, "now", False):
            return
        self._looking.now = True
        if any(map(self._holds, [*frame.f_locals.values(), returned])):
            self.files.setdefault(code.co_filename.removeprefix(CORE), set()).add(code.co_qualname)
        self._looking.now = False

    def _holds(self, value: Any, depth: int = 2) -> bool:
        if self._is_value(value):
            return True
        if not depth or not isinstance(value, (tuple, list, dict, MappingProxyType)) or len(value) > 300:
            return False
        if isinstance(value, (tuple, list)):
            return any(self._holds(one, depth - 1) for one in value)
        return "_parameters" not in value and any(self._holds(one, depth - 1) for one in value.values())


def is_rate(value: Any) -> bool:
    return value == RATE if type(value) is float else type(value) is str and value == str(RATE)


def is_batch(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.shape[:1] != (BATCH,):
        return False
    return value.shape[1:] == (1, 8, 8) or (value.ndim == 1 and value.dtype == torch.int64 and int(value.max()) < 10)


def is_update_of(parameters: list[Tensor]) -> Callable[[Any], bool]:
    """Return a test for the trained parameters: each, all in one tensor, or as bytes."""
    starts = {len(one): one[:4].double() for one in parameters}
    starts[sum(map(len, parameters))] = parameters[0][:4].double()
    content = parameters[0].numpy().tobytes()[:64]

    def is_update(value: Any) -> bool:
        if isinstance(value, (bytes, bytearray)):
            return content in value
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() not in starts:
            return False
        return torch.equal(value.detach().flatten()[:4].double(), starts[value.numel()])

    return is_update


class Inline(concurrent.futures.ThreadPoolExecutor):
    """Runs what it is given at once, so that a trip through a thread ends before the next step begins."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(function(*args, **options))
        return future


@pytest.fixture
def travel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, set[str]]]:
    """Return a function that runs the command and returns the files that a value entered, with their functions."""
    step, save = torch._fused_sgd_, CheckpointStore.save

    def run(trip: Trip, at_step: Callable[[int, list[Tensor]], None]) -> dict[str, set[str]]:
        steps = 0

        def counted(parameters: list[Tensor], *args: Any, **options: Any) -> None:
            nonlocal steps
            step(parameters, *args, **options)
            steps += 1
            at_step(steps, parameters)

        def saved(*args: Any, **options: Any) -> Any:
            done = save(*args, **options)
            trip.end()
            return done

        monkeypatch.setattr(torch, "_fused_sgd_", counted)
        monkeypatch.setattr(CheckpointStore, "save", saved)
        monkeypatch.setattr("fedcore.runs.training.ThreadPoolExecutor", Inline)
        monkeypatch.setattr(sys, "argv", [*COMMAND.split(), "--out", str(tmp_path / "run")])
        try:
            with contextlib.suppress(SystemExit):
                main()
        finally:
            sys.setprofile(None)
        assert steps == STEPS
        return trip.files

    return run


def test_a_batch_enters_six_files_from_the_samples_to_the_step(travel):
    trip = Trip(is_batch)
    files = travel(trip, lambda step, parameters: trip.begin() if step == 1 else trip.end())
    assert set(files) == {
        "client/loop.py", "client/context.py", "data/client_data.py", "data/images.py", "data/task.py",
        "models/split.py",
    }, files  # fmt: skip


def test_an_update_enters_ten_files_from_the_step_to_the_checkpoint(travel):
    trip = Trip(lambda value: False)

    def at_step(step: int, parameters: list[Tensor]) -> None:
        if step == STEPS:
            trip.begin(is_update_of([parameter.detach().clone().flatten() for parameter in parameters]))

    assert set(travel(trip, at_step)) == {
        "client/optimizer.py", "models/layout.py", "client/runtime.py", "server/validation.py",
        "server/aggregation.py", "runs/checkpoint.py", "base/serial.py", "base/tensors.py",
        "base/files.py", "models/split.py",
    }, trip.files  # fmt: skip


TO_THE_RUN_DIRECTORY = {"runs/run.py", "runs/saved.py", "base/safe_yaml.py"}
"""The rate is also written into config.yaml, which is another trip; so is what RunConfig.written does."""


def test_the_learning_rate_enters_six_files_from_the_flag_to_the_optimizer(travel):
    trip = Trip(is_rate)
    trip.begin()
    files = travel(trip, lambda step, parameters: trip.end())
    assert set(files) - TO_THE_RUN_DIRECTORY == {
        "cli/options.py", "cli/training.py", "cli/settings.py", "base/config.py", "base/section.py",
        "server/scope.py",
    }, files  # fmt: skip
    functions = [name for file, names in files.items() if file not in TO_THE_RUN_DIRECTORY for name in names]
    functions = [name for name in functions if not name.startswith("RunConfig.written")]
    assert len(functions) <= 9, functions
