"""The contract of a runner: however the steps of trainings are taken, results are those of one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fedcore import RunConfig, RunResult
from fedcore.client import OneByOne, Runner
from fedcore.data import Dataset
from fedcore.hooks import match
from fedcore.tools import registry
from fedcore_testing.checks.base import NotApplicable, check, trial_of
from fedcore_testing.compare import close, require_close_states, require_same
from fedcore_testing.federation import weights
from fedcore_testing.trial import Trial, finished

Offer = Callable[[RunConfig, Dataset], Runner | None]
"""What stands behind a name of the group ``fedcore.runners``."""

RUN: dict[str, Any] = {"participation": 1.0, "client_test_fraction": 0.0, "lr": 0.02}
"""All clients take part with the same number of samples. At a higher rate FedCD makes much of rounding."""

EPSILON = torch.finfo(torch.float32).eps
BITS = (0, 1, 2, 4, 8)
"""Changes of the learning rate, in its last place. Without one, a run that repeats has the same model."""

AMPLIFIED = 10
"""A difference of so many times the largest of these changes is no rounding."""


def the_same_as_one_by_one(runner: Offer, plugin: Any, *, rounding: bool = False, **options: Any) -> RunResult:
    """Check that a plugin trains with a runner as it does when its steps are taken one after the other.

    Models, records and states are compared. Give each installed plugin in turn. A warning of the runner's own package
    says that it does not take the plugin's steps: results have to be the same all the more.

    :param runner: offers a runner for a configuration and a data set, as an entry point of ``fedcore.runners`` does.
    :param plugin: its class or name, a :class:`Trial`, or a pair of a plugin and its options.
    :param rounding: results may differ by rounding.
    :param options: options of RunConfig.
    :returns: the run with the runner.
    :raises AssertionError: names the first difference.
    :raises NotApplicable: the runner does not apply to the run, or warned; the message has its reason.
    """
    trial = trial_of(*plugin) if isinstance(plugin, tuple) else trial_of(plugin)
    options = {**RUN, **options}
    offered: list[Runner] = []

    def offer(config: RunConfig, dataset: Dataset) -> Runner:
        by_runner = runner(config, dataset)
        if by_runner is None or type(by_runner) is OneByOne:
            return OneByOne()
        offered.append(by_runner)
        return by_runner

    with warnings.catch_warnings(record=True) as caught, steps_taken_by(offer):
        warnings.simplefilter("always")
        result = finished(trial.run(**options))
    how = f"with the runner {getattr(runner, '__name__', runner)}"
    with steps_taken_by(lambda config, dataset: OneByOne()):
        plain = finished(trial.run(**options))
        if rounding:
            require_close(trial, result, plain, how, **options)
        else:
            require_same(result, plain, how)
    packages = {_package(type(each)) for each in offered}
    own = [str(each.message) for each in caught if _package(each.category) in packages]
    if own or not offered:
        raise NotApplicable(own[0] if own else "the runner does not apply to this run")
    return result


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def steps_taken_by(offer: Callable[[RunConfig, Dataset], Runner]) -> AbstractContextManager[None]:
    """Let every run of this process take its steps by the runner that a function returns, in a block."""
    return registry.lent({("runner", name): offer for name in registry.available("runner")})


def require_close(trial: Trial, one: RunResult, other: RunResult, how: str, **options: Any) -> None:
    """Compare the models and states of two runs up to rounding.

    A method may amplify rounding, as Adam does on the server. Then the models may differ as much as by the last bits of
    the learning rate, and states are not compared.

    :param options: those of ``other``.
    """
    try:
        require_close_models(trial, weights(one), weights(other), f"{how}, the model differs in")
    except AssertionError:
        rates = [other.config.lr * (1 + bits * EPSILON) for bits in BITS]
        ways = [Trial(trial.name, trial.options, {**trial.overrides, "lr": rate}) for rate in rates]
        by_chance, *grown = (_distance(trial, finished(way.run(**options)), other) for way in ways)
        if by_chance or not _distance(trial, one, other) <= AMPLIFIED * max(grown):
            raise
    else:
        require_close_states(one, other, how)


def _distance(trial: Trial, one: RunResult, other: RunResult) -> float:
    """Return the largest difference between the models of two runs, without what the plugin corrects afterwards."""
    mine, theirs = weights(one), weights(other)
    pairs = [(mine[name].double(), theirs[name]) for name in _uncorrected(trial, theirs) if theirs[name].numel()]
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def _uncorrected(trial: Trial, model: Mapping[str, Tensor]) -> list[str]:
    return sorted(set(model) - set(match(trial.plugin.corrects, list(model), trial.plugin, "corrects")))


def require_close_models(trial: Trial, result: Mapping[str, Tensor], expected: Mapping[str, Tensor], how: str) -> None:
    """Compare two models up to rounding, but for the parameters that the plugin corrects after the training."""
    for name in _uncorrected(trial, expected):
        distance = 0.0 if close(result[name], expected[name]) else float((result[name] - expected[name]).abs().max())
        assert close(result[name], expected[name]), f"{how} {name!r}, by up to {distance:.3g}"


@check("let losses read what differs between clients from step and step.client only: attributes of self are shared.")
def check_the_same_as_one_by_one(trial: Trial) -> None:
    """Clients whose steps are taken together (``--stack``) get the same model and states up to rounding."""
    tried = [options for section in RunConfig.sections() for options in section.tries]
    if not tried:
        raise NotApplicable("no installed package takes steps together")
    for options in tried:
        the_same_as_one_by_one(_installed(), trial, rounding=True, **options)


def _installed() -> Offer:
    """Return the offer of the installed packages: their first runner. It may be lent in the place of each of them."""
    offers: list[Offer] = [registry.resolve("runner", name) for name in registry.available("runner")]
    return lambda config, dataset: next(filter(None, (offer(config, dataset) for offer in offers)), None)
