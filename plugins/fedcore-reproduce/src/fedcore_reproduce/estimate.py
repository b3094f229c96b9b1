"""How long a table will take on this machine, from one timed round of its first run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedcore import FedcoreError, RunConfig
from fedcore.tools import PluginSet, digest, method, output
from fedcore_reproduce.run import Plan
from fedcore_study.tools import SweepDirectory, default_parallel, resolved

FEWEST = 3
"""The smallest number of runs for which an estimate is worth a round."""

PROCESS = 0.3
"""Seconds that a run's process takes to begin and to end."""


@dataclass(frozen=True)
class Timed:
    """One round of a run, in seconds: ``setup`` until it begins, ``round`` its training, ``evaluation`` after it."""

    config: RunConfig
    setup: float
    round: float
    evaluation: float


@dataclass(frozen=True)
class Estimate:
    """Seconds for ``runs`` runs, ``parallel`` at a time."""

    seconds: float
    runs: int
    parallel: int
    timed: Timed

    def __str__(self) -> str:
        """Return the sentence that is shown before a table's runs begin."""
        side = f", {self.parallel} at a time" if self.parallel > 1 else ""
        took = f"a round of {method(self.timed.config.plugins)} takes {output.duration(self.timed.round)} here now"
        return f"about {output.duration(self.seconds)} for {self.runs} runs{side}: {took}"


def estimate(planned: Plan, out: Path, parallel: int | None) -> Estimate | None:
    """Train one round of the first unfinished run in a temporary folder, and extrapolate from its time.

    Training is assumed to be proportional to clients, epochs and samples, evaluation to the number of models. What a
    method adds to a step is not known. Return None if few runs are left, or if the round cannot be trained.
    """
    left = unfinished(planned, out)
    if len(left) < FEWEST:
        return None
    try:
        timed = time_round(left[0])
    except FedcoreError:
        return None  # the run itself will say why
    parallel = min(parallel or default_parallel(left), len(left))
    return Estimate(total(timed, left) / parallel, len(left), parallel, timed)


def unfinished(planned: Plan, out: Path) -> list[RunConfig]:
    """Return the runs of a plan that are not finished in a sweep's folder."""
    if planned.sweep is None:
        return []
    directory = SweepDirectory(out)
    names = {digest(config): name for name, config in directory.plan().items()} if SweepDirectory.is_one(out) else {}
    configs = (resolved(config) for _, config in planned.sweep.cells())
    return [c for c in configs if digest(c) not in names or directory.standing(names[digest(c)]) != "finished"]


def time_round(config: RunConfig) -> Timed:
    """Train and evaluate the first round of a run in this process.

    :raises FedcoreError: it cannot be trained.
    """
    from fedcore.tools import started

    with tempfile.TemporaryDirectory() as folder:
        changes = {"out": Path(folder) / "run", "workers": 0, "eval_every": 1, "trackers": {}}
        began = time.perf_counter()
        with started(config.model_copy(update=changes), notify=lambda event, details: None) as (experiment, state):
            setup = time.perf_counter() - began
            experiment.one_round(state)
            seconds = experiment.directory.metrics.read()[0]["time"]
    return Timed(config, setup, seconds["round"], seconds["evaluation"])


def total(timed: Timed, configs: Iterable[RunConfig]) -> float:
    """Return the seconds that runs take one after the other, each in a new process."""
    seconds = 0.0
    for config in configs:
        evaluations = -(-config.rounds // config.eval_every)
        seconds += PROCESS + timed.setup
        seconds += config.rounds * timed.round * _share(config, timed.config)
        seconds += evaluations * timed.evaluation * _models(config) / _models(timed.config)
    return seconds


def _share(config: RunConfig, other: RunConfig) -> float:
    """Return the estimated training time of a round, relative to a round of the other run.

    If a run takes all samples, their number is not known here, and both runs count as equally large.
    """
    ours, theirs = (getattr(each, "samples", None) for each in (config, other))  # an option of fedcore-zoo
    samples = ours / theirs if ours and theirs else 1
    return config.local_epochs / other.local_epochs * config.participation / other.participation * samples


def _models(config: RunConfig) -> int:
    """Return how many models are evaluated: the global model, and each client's own if the method has such models."""
    plugins = PluginSet.create(config.plugins)
    own = plugins.implementers("personal_model") or plugins.implementers("personal_parameters")
    return 1 + config.clients * bool(own)
