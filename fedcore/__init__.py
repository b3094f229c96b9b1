"""fedcore: federated learning where a method is a set of small hooks around one round loop.

The public names below are imported on first use, so that listing plugins needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcore.base.version import __version__

if TYPE_CHECKING:
    from fedcore.base.config import RunConfig as RunConfig
    from fedcore.base.errors import FedcoreError as FedcoreError
    from fedcore.base.errors import RejectUpdate as RejectUpdate
    from fedcore.base.types import Answer as Answer
    from fedcore.base.types import ClientUpdate as ClientUpdate
    from fedcore.base.types import Loss as Loss
    from fedcore.hooks.contexts import ClientContext as ClientContext
    from fedcore.hooks.contexts import RunSetup as RunSetup
    from fedcore.hooks.contexts import ServerContext as ServerContext
    from fedcore.hooks.contexts import Step as Step
    from fedcore.hooks.hookspecs import hookimpl as hookimpl
    from fedcore.hooks.plugins import Plugin as Plugin
    from fedcore.hooks.plugins import PluginOptions as PluginOptions
    from fedcore.models import ModelTask as ModelTask
    from fedcore.models import SplitModel as SplitModel
    from fedcore.runs.experiment import RunResult as RunResult
    from fedcore.runs.experiment import evaluate_run as evaluate_run
    from fedcore.runs.experiment import resume as resume
    from fedcore.runs.experiment import run as run

_HOMES = {
    "Answer": "base.types",
    "ClientContext": "hooks.contexts",
    "ClientUpdate": "base.types",
    "FedcoreError": "base.errors",
    "Loss": "base.types",
    "ModelTask": "models",
    "Plugin": "hooks.plugins",
    "PluginOptions": "hooks.plugins",
    "RejectUpdate": "base.errors",
    "RunConfig": "base.config",
    "RunResult": "runs.experiment",
    "ServerContext": "hooks.contexts",
    "RunSetup": "hooks.contexts",
    "SplitModel": "models",
    "Step": "hooks.contexts",
    "evaluate_run": "runs.experiment",
    "hookimpl": "hooks.hookspecs",
    "resume": "runs.experiment",
    "run": "runs.experiment",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedcore' has no attribute {name!r}")
