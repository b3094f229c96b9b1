"""One plugin under test: its class and name, and the runs that several checks share."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from fedcore import FedcoreError, Plugin, RunConfig, RunResult
from fedcore.data import Task
from fedcore.engines import ClientSite, Engine
from fedcore.hooks import BUILTIN, create_plugin
from fedcore.tools import PROTOCOLS, process, registry
from fedcore_testing import problems
from fedcore_testing.federation import Choice, federate, name_of, records
from fedcore_testing.findings import Finding
from fedcore_testing.fingerprint import shared_places
from fedcore_testing.watch import watched

HERE = f"module:{problems.__name__}."
RUN: dict[str, Any] = {
    "dataset": f"{HERE}few_digits",
    "partition": "iid",
    "clients": 3,
    "rounds": 2,
    "local_epochs": 2,
    "batch_size": 16,
    "participation": 0.67,
    "client_test_fraction": 0.2,
}
"""The run that checks vary: 2 of 3 clients per round, 32 samples each."""


class Watched(NamedTuple):
    """Findings of a watched run.

    :param moved: places outside the plugin's objects whose contents changed during the run.
    :param error: the error that ended the run early; None if it finished.
    """

    findings: list[Finding]
    moved: list[str]
    error: Exception | None


class Trial:
    """One plugin under test.

    :param target: its class, or the name under which it is installed (or ``module:package.module.Class``).
    :param options: the plugin's own options, by name; the others have their defaults.
    :param overrides: options of the run, such as ``dataset`` and ``model``, in place of those of every check. With a
        ``task`` alone, they are completed by a data set and a model of it.
    :raises UnknownNameError: no installed package provides the name.
    """

    def __init__(
        self, target: Any, options: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
    ) -> None:
        self.options, self.overrides = dict(options or {}), _of_task(overrides or {})
        self.target = registry.resolve("plugin", target) if isinstance(target, str) else target
        self.name = target if isinstance(target, str) else name_of(target)
        self.label = self.name
        if self.name.startswith("module:"):
            self.label = getattr(self.target, "__name__", str(self.target)).lower()
        folder = tempfile.mkdtemp(prefix="fedcore-check-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return self.label

    def run(
        self,
        *others: Choice,
        before: tuple[Choice, ...] = (),
        settings: dict[str, Any] | None = None,
        engine: str | Callable[[ClientSite], Engine] | None = None,
        findings: list[Finding] | None = None,
        **options: Any,
    ) -> RunResult:
        """Run the plugin with :meth:`run_options`.

        :param others: plugins after this one; ``before``: plugins before it.
        :param settings: the plugin's own options, instead of this trial's.
        :param findings: watch every hook, and add what it does wrong.
        """
        target: str | type = self.name
        if findings is not None and self.name != BUILTIN:  # FedAvg has no hooks, and nothing else may have its name
            target = watched(self.target, findings)
        own: Choice = (target, self.options if settings is None else settings)
        run = self.run_options(**options)
        return federate(self.folder, *before, own, *others, notify=_silent, engine=engine, **run)

    def run_options(self, **options: Any) -> dict[str, Any]:
        """Return :data:`RUN` with ``options``, which override it, and ``overrides``, which override these."""
        return {**RUN, **self.needs, **options, **self.overrides}

    @property
    def needs(self) -> dict[str, Any]:
        """The options of a run without which the plugin is refused."""
        return {"public": "digits"} if "public" in self.plugin.reads else {}

    @cached_property
    def plugin(self) -> Plugin:
        """The plugin's object with these options: declarations may depend on them."""
        return create_plugin(self.name, self.options)

    @property
    def config(self) -> RunConfig:
        """The run of :data:`RUN`, as a configuration."""
        own = {"plugins": {self.name: self.options}, "workers": 0}
        return RunConfig.create(self.run_options(**own))

    @cached_property
    def usual(self) -> RunResult:
        """The run of :data:`RUN`."""
        return self.run()

    @cached_property
    def watched(self) -> Watched:
        """The same on a model with BatchNorm and dropout, all clients in each round, with every hook watched."""
        findings: list[Finding] = []
        error: Exception | None = None
        before = shared_places(self.target)
        try:
            result = self.run(findings=findings, model=f"{HERE}with_batch_norm", participation=1.0)
            problem = failures(result)
            error = FedcoreError(problem) if problem else None
        except Exception as raised:  # whatever a plugin does is a finding
            error = raised
        after = shared_places(self.target)
        moved = sorted(place for place in {*before, *after} if before.get(place) != after.get(place))
        return Watched(findings, moved, error)


def _of_task(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a run, with a small data set of their task and a model for it."""
    if "task" not in options or "dataset" in options:
        return dict(options)
    task: type[Task] = registry.resolve("task", options["task"])
    model = {"model": task.model} if task.model else {}
    return {"dataset": task.example or RUN["dataset"], "samples": problems.FEW, **model, **options}


def _silent(event: str, details: Mapping[str, Any]) -> None:
    """Show nothing: notes are about the kit's options, not about the plugin."""


def finished(result: RunResult) -> RunResult:
    """Return the result of a run in which no client failed.

    :raises AssertionError: with the failures.
    """
    problem = failures(result)
    assert not problem, problem
    return result


def failures(result: RunResult) -> str:
    """Return the failed clients of a run and of its evaluations, with messages; empty if none failed."""
    failed = [
        f"round {record['round'] + 1 if 'round' in record else 'after the last'}{during}: "
        f"client {failure['client']} {failure['kind']}: {failure['message']}"
        for record in records(result)
        for during, failures in (
            ("", record["failures"]),
            (", evaluation", (record.get("metrics") or {}).get("failures", ())),
        )
        for failure in failures
    ]
    failed += [f"evaluation {name!r}: {reason}" for name, reason in _not_finite(result.metrics)]
    return "; ".join(failed[:3])


def _not_finite(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, row in metrics.items():
        if name in PROTOCOLS and not PROTOCOLS[name].own_model and row and "loss_reason" in row:
            yield name, row["loss_reason"]


def importable_in_workers() -> Any:
    """Return a context in which the workers of every engine can import what this process can.

    The workers of the local engine always can.
    """
    return mock.patch.dict(os.environ, PYTHONPATH=process.environment()["PYTHONPATH"])
