"""fedcore: federated learning where a method is a set of small hooks around one round loop.

The public names below are imported on first use, so that listing plugins needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedcore.base.lazy import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedcore.base.config import RunConfig as RunConfig
    from fedcore.base.errors import ConfigError as ConfigError
    from fedcore.base.errors import DataError as DataError
    from fedcore.base.errors import DivergedError as DivergedError
    from fedcore.base.errors import FedcoreError as FedcoreError
    from fedcore.base.errors import PluginCallError as PluginCallError
    from fedcore.base.errors import PluginConflictError as PluginConflictError
    from fedcore.base.errors import PluginContractError as PluginContractError
    from fedcore.base.errors import RejectUpdate as RejectUpdate
    from fedcore.base.errors import RoundFailedError as RoundFailedError
    from fedcore.base.errors import RunDirectoryError as RunDirectoryError
    from fedcore.base.errors import UnknownNameError as UnknownNameError
    from fedcore.base.metrics import Counts as Counts
    from fedcore.base.metrics import Metric as Metric
    from fedcore.base.section import Repeated as Repeated
    from fedcore.base.section import Section as Section
    from fedcore.base.section import Trait as Trait
    from fedcore.base.seeding import derive_seed as derive_seed
    from fedcore.base.seeding import generator as generator
    from fedcore.base.seeding import numpy_generator as numpy_generator
    from fedcore.base.tensors import check_changes as check_changes
    from fedcore.base.tensors import check_tensors as check_tensors
    from fedcore.base.types import Answer as Answer
    from fedcore.base.types import ClientUpdate as ClientUpdate
    from fedcore.base.types import Loss as Loss
    from fedcore.base.types import Steps as Steps
    from fedcore.base.types import Tensors as Tensors
    from fedcore.hooks.contexts import ClientContext as ClientContext
    from fedcore.hooks.contexts import RunSetup as RunSetup
    from fedcore.hooks.contexts import ServerContext as ServerContext
    from fedcore.hooks.contexts import Step as Step
    from fedcore.hooks.hookspecs import hookimpl as hookimpl
    from fedcore.hooks.plugin import PLACE as PLACE
    from fedcore.hooks.plugin import Exchange as Exchange
    from fedcore.hooks.plugin import Plugin as Plugin
    from fedcore.hooks.plugin import PluginOptions as PluginOptions
    from fedcore.hooks.plugin import question as question
    from fedcore.models.split import ModelTask as ModelTask
    from fedcore.models.split import SplitModel as SplitModel
    from fedcore.runs.api import client_model as client_model
    from fedcore.runs.api import evaluate_run as evaluate_run
    from fedcore.runs.api import load_run as load_run
    from fedcore.runs.api import resume as resume
    from fedcore.runs.api import run as run
    from fedcore.runs.result import RunResult as RunResult
    from fedcore.runs.training import CallbackError as CallbackError
    from fedcore.runs.training import Interrupted as Interrupted
    from fedcore.server.system import SimulatedOutcome as SimulatedOutcome
    from fedcore.server.system import System as System

__getattr__, __dir__, __all__ = lazy(__name__, __file__, "__version__")
