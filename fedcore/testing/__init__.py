"""What authors of plugins test with: the conformance kit, small federations, and host-sync detection."""

from fedcore.client.evaluation import evaluate
from fedcore.hooks.checks import create_plugin
from fedcore.runs.directory import RunDirectory
from fedcore.testing.analytic import (
    Quadratic,
    W,
    analytic_federation,
    base_and_head,
    distance_by_hand,
    steps_by_hand,
)
from fedcore.testing.checks import CHECKS, CheckFailed, NotApplicable
from fedcore.testing.engine_contract import check_engine
from fedcore.testing.federation import (
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
from fedcore.testing.fixtures import federations, runner
from fedcore.testing.forked import forked_workers
from fedcore.testing.kit import Verdict, check_plugin, parametrize_with_checks, run_checks
from fedcore.testing.parts import check_dataset, check_model, check_partitioner
from fedcore.testing.problems import halves, linear, one_sample, two_one_rest, with_batch_norm
from fedcore.testing.softmax import client_arrays, mean_by_hand, softmax_by_hand
from fedcore.testing.stub_plugins import (
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
    StepsOnServer,
)
from fedcore.testing.sync import HostSync, forbid_host_sync, steps_without_host_sync
from fedcore.testing.trackers import check_tracker

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
    "check_tracker",
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
