"""What authors of plugins test with: the conformance kit, small federations, and host-sync detection.

The names are imported on first use, so that the commands of this package answer ``--help`` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.tools import lazy

if TYPE_CHECKING:
    from fedcore_testing.analytic import Quadratic as Quadratic
    from fedcore_testing.analytic import W as W
    from fedcore_testing.analytic import analytic_federation as analytic_federation
    from fedcore_testing.analytic import base_and_head as base_and_head
    from fedcore_testing.analytic import distance_by_hand as distance_by_hand
    from fedcore_testing.analytic import steps_by_hand as steps_by_hand
    from fedcore_testing.checks import CHECKS as CHECKS
    from fedcore_testing.checks import CheckFailed as CheckFailed
    from fedcore_testing.checks import NotApplicable as NotApplicable
    from fedcore_testing.checks import the_same_as_one_by_one as the_same_as_one_by_one
    from fedcore_testing.engine_contract import check_engine as check_engine
    from fedcore_testing.federation import SMALL as SMALL
    from fedcore_testing.federation import client_state as client_state
    from fedcore_testing.federation import committed as committed
    from fedcore_testing.federation import federate as federate
    from fedcore_testing.federation import federations as federations
    from fedcore_testing.federation import initial_weights as initial_weights
    from fedcore_testing.federation import installed as installed
    from fedcore_testing.federation import interrupted as interrupted
    from fedcore_testing.federation import killed as killed
    from fedcore_testing.federation import model_bytes as model_bytes
    from fedcore_testing.federation import name_of as name_of
    from fedcore_testing.federation import needs_of as needs_of
    from fedcore_testing.federation import partition_of as partition_of
    from fedcore_testing.federation import personal_state as personal_state
    from fedcore_testing.federation import plugin_state as plugin_state
    from fedcore_testing.federation import records as records
    from fedcore_testing.federation import runner as runner
    from fedcore_testing.federation import same_tensors as same_tensors
    from fedcore_testing.federation import small_config as small_config
    from fedcore_testing.federation import weights as weights
    from fedcore_testing.forked import forked_workers as forked_workers
    from fedcore_testing.kit import Verdict as Verdict
    from fedcore_testing.kit import check_plugin as check_plugin
    from fedcore_testing.kit import parametrize_with_checks as parametrize_with_checks
    from fedcore_testing.kit import run_checks as run_checks
    from fedcore_testing.parts import check_dataset as check_dataset
    from fedcore_testing.parts import check_model as check_model
    from fedcore_testing.parts import check_partitioner as check_partitioner
    from fedcore_testing.problems import halves as halves
    from fedcore_testing.problems import hidden_tanh as hidden_tanh
    from fedcore_testing.problems import linear as linear
    from fedcore_testing.problems import one_sample as one_sample
    from fedcore_testing.problems import two_one_rest as two_one_rest
    from fedcore_testing.problems import with_batch_norm as with_batch_norm
    from fedcore_testing.softmax import client_arrays as client_arrays
    from fedcore_testing.softmax import mean_by_hand as mean_by_hand
    from fedcore_testing.softmax import sgd_by_hand as sgd_by_hand
    from fedcore_testing.softmax import softmax_by_hand as softmax_by_hand
    from fedcore_testing.softmax import tanh_by_hand as tanh_by_hand
    from fedcore_testing.stub_plugins import Cohorts as Cohorts
    from fedcore_testing.stub_plugins import CorrectsClassifier as CorrectsClassifier
    from fedcore_testing.stub_plugins import EqualWeights as EqualWeights
    from fedcore_testing.stub_plugins import ExchangesClassifier as ExchangesClassifier
    from fedcore_testing.stub_plugins import FrozenEncoder as FrozenEncoder
    from fedcore_testing.stub_plugins import OwnsClassifier as OwnsClassifier
    from fedcore_testing.stub_plugins import OwnTaskLoss as OwnTaskLoss
    from fedcore_testing.stub_plugins import PersonalClassifier as PersonalClassifier
    from fedcore_testing.stub_plugins import PersonalModel as PersonalModel
    from fedcore_testing.stub_plugins import PrefersClass0 as PrefersClass0
    from fedcore_testing.stub_plugins import RejectsClient1 as RejectsClient1
    from fedcore_testing.stub_plugins import RejectsRound1 as RejectsRound1
    from fedcore_testing.stub_plugins import StepsOnServer as StepsOnServer
    from fedcore_testing.sync import HostSync as HostSync
    from fedcore_testing.sync import forbid_host_sync as forbid_host_sync
    from fedcore_testing.sync import steps_without_host_sync as steps_without_host_sync

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
