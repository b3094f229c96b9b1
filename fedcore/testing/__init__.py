"""What authors of plugins test with: the conformance kit, small federations, and a ban on waiting for the device."""

from fedcore.testing.analytic import Quadratic, analytic_federation, distance_by_hand, steps_by_hand
from fedcore.testing.checks import CHECKS, CheckFailed, NotApplicable
from fedcore.testing.engine_contract import check_engine
from fedcore.testing.federation import (
    SMALL,
    client_state,
    committed,
    federate,
    installed,
    interrupted,
    killed,
    model_bytes,
    name_of,
    personal_state,
    records,
    same_tensors,
    small_config,
    weights,
)
from fedcore.testing.kit import Verdict, check_plugin, parametrize_with_checks, run_checks
from fedcore.testing.parts import check_dataset, check_model, check_partitioner
from fedcore.testing.stub_plugins import (
    Cohorts,
    CorrectsClassifier,
    EqualWeights,
    ExchangesClassifier,
    FrozenEncoder,
    OwnsClassifier,
    PersonalClassifier,
    PersonalModel,
    PrefersClass0,
    StepsOnServer,
)
from fedcore.testing.sync import HostSync, forbid_host_sync, steps_without_host_sync
from fedcore.testing.texts import commands_of, lines_of_code
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
    "OwnsClassifier",
    "PersonalClassifier",
    "PersonalModel",
    "PrefersClass0",
    "Quadratic",
    "StepsOnServer",
    "Verdict",
    "analytic_federation",
    "check_dataset",
    "check_engine",
    "check_model",
    "check_partitioner",
    "check_plugin",
    "check_tracker",
    "client_state",
    "commands_of",
    "committed",
    "distance_by_hand",
    "federate",
    "forbid_host_sync",
    "installed",
    "interrupted",
    "killed",
    "lines_of_code",
    "model_bytes",
    "name_of",
    "parametrize_with_checks",
    "personal_state",
    "records",
    "run_checks",
    "same_tensors",
    "small_config",
    "steps_by_hand",
    "steps_without_host_sync",
    "weights",
]
