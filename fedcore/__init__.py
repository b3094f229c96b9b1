"""fedcore: federated learning where a method is a set of small hooks around one round loop.

The public names below are imported on first use, so that listing plugins needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcore._version import __version__

if TYPE_CHECKING:
    from fedcore.client import ClientContext as ClientContext
    from fedcore.config import RunConfig as RunConfig
    from fedcore.errors import FedcoreError as FedcoreError
    from fedcore.errors import RejectUpdate as RejectUpdate
    from fedcore.experiment import RunResult as RunResult
    from fedcore.experiment import evaluate_run as evaluate_run
    from fedcore.experiment import resume as resume
    from fedcore.experiment import run as run
    from fedcore.hookspecs import hookimpl as hookimpl
    from fedcore.local import Step as Step
    from fedcore.models import ModelTask as ModelTask
    from fedcore.models import SplitModel as SplitModel
    from fedcore.plugins import Plugin as Plugin
    from fedcore.plugins import PluginOptions as PluginOptions
    from fedcore.server import ServerContext as ServerContext
    from fedcore.types import Answer as Answer
    from fedcore.types import ClientUpdate as ClientUpdate
    from fedcore.types import Loss as Loss

_HOMES = {
    "Answer": "types",
    "ClientContext": "client",
    "ClientUpdate": "types",
    "FedcoreError": "errors",
    "Loss": "types",
    "ModelTask": "models",
    "Plugin": "plugins",
    "PluginOptions": "plugins",
    "RejectUpdate": "errors",
    "RunConfig": "config",
    "RunResult": "experiment",
    "ServerContext": "server",
    "SplitModel": "models",
    "Step": "local",
    "evaluate_run": "experiment",
    "hookimpl": "hookspecs",
    "resume": "experiment",
    "run": "experiment",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedcore.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedcore' has no attribute {name!r}")
