"""What authors of plugins test with: the conformance kit, small federations, and host-sync detection.

The names are imported on first use, so that the commands of this package answer ``--help`` without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcore.client.evaluation import evaluate
    from fedcore.hooks.checks import create_plugin
    from fedcore.runs.directory import RunDirectory
    from fedcore_testing.analytic import (
        Quadratic,
        W,
        analytic_federation,
        base_and_head,
        distance_by_hand,
        steps_by_hand,
    )
    from fedcore_testing.checks import CHECKS, CheckFailed, NotApplicable
    from fedcore_testing.engine_contract import check_engine
    from fedcore_testing.federation import (
        SMALL,
        client_state,
        committed,
        federate,
        initial_weights,
        installed,
        interrupted,
        killed,
        model_bytes,
        name_of,
        needs_of,
        partition_of,
        personal_state,
        plugin_state,
        records,
        same_tensors,
        small_config,
        weights,
    )
    from fedcore_testing.fixtures import federations, runner
    from fedcore_testing.forked import forked_workers
    from fedcore_testing.kit import Verdict, check_plugin, parametrize_with_checks, run_checks
    from fedcore_testing.parts import check_dataset, check_model, check_partitioner
    from fedcore_testing.problems import halves, linear, one_sample, two_one_rest, with_batch_norm
    from fedcore_testing.softmax import client_arrays, mean_by_hand, softmax_by_hand
    from fedcore_testing.stub_plugins import (
        Cohorts,
        CorrectsClassifier,
        EqualWeights,
        ExchangesClassifier,
        FrozenEncoder,
        OwnsClassifier,
        OwnTaskLoss,
        PersonalClassifier,
        PersonalModel,
        PrefersClass0,
        RejectsClient1,
        StepsOnServer,
    )
    from fedcore_testing.sync import HostSync, forbid_host_sync, steps_without_host_sync

_HOMES = {
    "CHECKS": "fedcore_testing.checks",
    "CheckFailed": "fedcore_testing.checks",
    "Cohorts": "fedcore_testing.stub_plugins",
    "CorrectsClassifier": "fedcore_testing.stub_plugins",
    "EqualWeights": "fedcore_testing.stub_plugins",
    "ExchangesClassifier": "fedcore_testing.stub_plugins",
    "FrozenEncoder": "fedcore_testing.stub_plugins",
    "HostSync": "fedcore_testing.sync",
    "NotApplicable": "fedcore_testing.checks",
    "OwnTaskLoss": "fedcore_testing.stub_plugins",
    "OwnsClassifier": "fedcore_testing.stub_plugins",
    "PersonalClassifier": "fedcore_testing.stub_plugins",
    "PersonalModel": "fedcore_testing.stub_plugins",
    "PrefersClass0": "fedcore_testing.stub_plugins",
    "Quadratic": "fedcore_testing.analytic",
    "RejectsClient1": "fedcore_testing.stub_plugins",
    "RunDirectory": "fedcore.runs.directory",
    "SMALL": "fedcore_testing.federation",
    "StepsOnServer": "fedcore_testing.stub_plugins",
    "Verdict": "fedcore_testing.kit",
    "W": "fedcore_testing.analytic",
    "analytic_federation": "fedcore_testing.analytic",
    "base_and_head": "fedcore_testing.analytic",
    "check_dataset": "fedcore_testing.parts",
    "check_engine": "fedcore_testing.engine_contract",
    "check_model": "fedcore_testing.parts",
    "check_partitioner": "fedcore_testing.parts",
    "check_plugin": "fedcore_testing.kit",
    "client_arrays": "fedcore_testing.softmax",
    "client_state": "fedcore_testing.federation",
    "committed": "fedcore_testing.federation",
    "create_plugin": "fedcore.hooks.checks",
    "distance_by_hand": "fedcore_testing.analytic",
    "evaluate": "fedcore.client.evaluation",
    "federate": "fedcore_testing.federation",
    "federations": "fedcore_testing.fixtures",
    "forbid_host_sync": "fedcore_testing.sync",
    "forked_workers": "fedcore_testing.forked",
    "halves": "fedcore_testing.problems",
    "initial_weights": "fedcore_testing.federation",
    "installed": "fedcore_testing.federation",
    "interrupted": "fedcore_testing.federation",
    "killed": "fedcore_testing.federation",
    "linear": "fedcore_testing.problems",
    "mean_by_hand": "fedcore_testing.softmax",
    "model_bytes": "fedcore_testing.federation",
    "name_of": "fedcore_testing.federation",
    "needs_of": "fedcore_testing.federation",
    "one_sample": "fedcore_testing.problems",
    "parametrize_with_checks": "fedcore_testing.kit",
    "partition_of": "fedcore_testing.federation",
    "personal_state": "fedcore_testing.federation",
    "plugin_state": "fedcore_testing.federation",
    "records": "fedcore_testing.federation",
    "run_checks": "fedcore_testing.kit",
    "runner": "fedcore_testing.fixtures",
    "same_tensors": "fedcore_testing.federation",
    "small_config": "fedcore_testing.federation",
    "softmax_by_hand": "fedcore_testing.softmax",
    "steps_by_hand": "fedcore_testing.analytic",
    "steps_without_host_sync": "fedcore_testing.sync",
    "two_one_rest": "fedcore_testing.problems",
    "weights": "fedcore_testing.federation",
    "with_batch_norm": "fedcore_testing.problems",
}

__all__ = [
    "CHECKS",
    "SMALL",
    "CheckFailed",
    "Cohorts",
    "CorrectsClassifier",
    "EqualWeights",
    "ExchangesClassifier",
    "FrozenEncoder",
    "HostSync",
    "NotApplicable",
    "OwnTaskLoss",
    "OwnsClassifier",
    "PersonalClassifier",
    "PersonalModel",
    "PrefersClass0",
    "Quadratic",
    "RejectsClient1",
    "RunDirectory",
    "StepsOnServer",
    "Verdict",
    "W",
    "analytic_federation",
    "base_and_head",
    "check_dataset",
    "check_engine",
    "check_model",
    "check_partitioner",
    "check_plugin",
    "client_arrays",
    "client_state",
    "committed",
    "create_plugin",
    "distance_by_hand",
    "evaluate",
    "federate",
    "federations",
    "forbid_host_sync",
    "forked_workers",
    "halves",
    "initial_weights",
    "installed",
    "interrupted",
    "killed",
    "linear",
    "mean_by_hand",
    "model_bytes",
    "name_of",
    "needs_of",
    "one_sample",
    "parametrize_with_checks",
    "partition_of",
    "personal_state",
    "plugin_state",
    "records",
    "run_checks",
    "runner",
    "same_tensors",
    "small_config",
    "softmax_by_hand",
    "steps_by_hand",
    "steps_without_host_sync",
    "two_one_rest",
    "weights",
    "with_batch_norm",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
