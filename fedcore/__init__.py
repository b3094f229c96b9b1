"""fedcore: federated learning where a method is a set of small hooks around one round loop.

The public names below are imported on first use, so that listing plugins needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedcore.base.config import RunConfig as RunConfig
    from fedcore.base.errors import ConfigError as ConfigError
    from fedcore.base.errors import DataError as DataError
    from fedcore.base.errors import DivergedError as DivergedError
    from fedcore.base.errors import FedcoreError as FedcoreError
    from fedcore.base.errors import PluginConflictError as PluginConflictError
    from fedcore.base.errors import PluginContractError as PluginContractError
    from fedcore.base.errors import RejectUpdate as RejectUpdate
    from fedcore.base.errors import RoundFailedError as RoundFailedError
    from fedcore.base.errors import RunDirectoryError as RunDirectoryError
    from fedcore.base.errors import UnknownNameError as UnknownNameError
    from fedcore.base.metrics import Metric as Metric
    from fedcore.base.seeding import derive_seed as derive_seed
    from fedcore.base.seeding import generator as generator
    from fedcore.base.seeding import numpy_generator as numpy_generator
    from fedcore.base.tensors import check_changes as check_changes
    from fedcore.base.tensors import check_tensors as check_tensors
    from fedcore.base.types import Answer as Answer
    from fedcore.base.types import ClientUpdate as ClientUpdate
    from fedcore.base.types import Loss as Loss
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
    from fedcore.runs.experiment import client_model as client_model
    from fedcore.runs.experiment import evaluate_run as evaluate_run
    from fedcore.runs.experiment import load_run as load_run
    from fedcore.runs.experiment import resume as resume
    from fedcore.runs.experiment import run as run
    from fedcore.runs.result import RunResult as RunResult
    from fedcore.runs.training import CallbackError as CallbackError
    from fedcore.runs.training import Interrupted as Interrupted
    from fedcore.server.system import SimulatedOutcome as SimulatedOutcome
    from fedcore.server.system import System as System

_HOMES = {
    "Answer": "base.types",
    "CallbackError": "runs.training",
    "ClientContext": "hooks.contexts",
    "ClientUpdate": "base.types",
    "ConfigError": "base.errors",
    "DataError": "base.errors",
    "DivergedError": "base.errors",
    "Exchange": "hooks.plugin",
    "FedcoreError": "base.errors",
    "Interrupted": "runs.training",
    "Loss": "base.types",
    "Metric": "base.metrics",
    "ModelTask": "models.split",
    "PLACE": "hooks.plugin",
    "Plugin": "hooks.plugin",
    "PluginConflictError": "base.errors",
    "PluginContractError": "base.errors",
    "PluginOptions": "hooks.plugin",
    "RejectUpdate": "base.errors",
    "RoundFailedError": "base.errors",
    "RunConfig": "base.config",
    "RunDirectoryError": "base.errors",
    "RunResult": "runs.result",
    "RunSetup": "hooks.contexts",
    "ServerContext": "hooks.contexts",
    "SimulatedOutcome": "server.system",
    "SplitModel": "models.split",
    "Step": "hooks.contexts",
    "System": "server.system",
    "Tensors": "base.types",
    "UnknownNameError": "base.errors",
    "check_changes": "base.tensors",
    "check_tensors": "base.tensors",
    "client_model": "runs.experiment",
    "derive_seed": "base.seeding",
    "evaluate_run": "runs.experiment",
    "generator": "base.seeding",
    "hookimpl": "hooks.hookspecs",
    "load_run": "runs.experiment",
    "numpy_generator": "base.seeding",
    "question": "hooks.plugin",
    "resume": "runs.experiment",
    "run": "runs.experiment",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
