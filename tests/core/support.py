"""Short ways to run fedcore with plugins of a test, and to read back what a run left."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import fedcore
from fedcore import Plugin, RunConfig
from fedcore.rundir import RunDirectory
from fedcore.testing import client_state, weights

__all__ = ["client_state", "weights"]  # those of fedcore.testing, beside what is defined here

DIGITS = {"workers": 0, "clients": 4, "rounds": 1, "local_epochs": 1, "batch_size": 64, "device": "cpu"}
TOY = {
    "workers": 0,
    "device": "cpu",
    "dataset": "module:tests.core.toy.two_centres",
    "model": "module:tests.core.toy.at_origin",
    "partition": "module:tests.core.toy.first_and_rest",
    "clients": 2,
    "rounds": 1,
    "local_epochs": 2,
    "batch_size": 8,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


def name_of(cls: object) -> str:
    """Return the name under which a config finds a class; one that is local to a test is offered here."""
    if isinstance(cls, str):
        return cls
    module = sys.modules.get(cls.__module__)
    if getattr(module, cls.__name__, None) is cls:
        return f"module:{cls.__module__}.{cls.__name__}"
    setattr(sys.modules[__name__], cls.__name__, cls)
    return f"module:{__name__}.{cls.__name__}"


def config(tmp_path: Path, *plugins: str | type[Plugin] | tuple, **options) -> RunConfig:
    """Return the configuration of a small run on digits."""
    chosen = {}
    for plugin in plugins:
        cls, settings = plugin if isinstance(plugin, tuple) else (plugin, {})
        chosen[name_of(cls)] = settings
    out = options.pop("out", None) or tempfile.mkdtemp(dir=tmp_path)
    return RunConfig(**{**DIGITS, **options}, plugins=chosen, out=out)


def run(tmp_path: Path, *plugins, notify=None, **options):
    """Run on digits."""
    return fedcore.run(config(tmp_path, *plugins, **options), notify=notify)


def run_toy(tmp_path: Path, *plugins, **options):
    """Run the TOY; its quadratic task loss comes with it."""
    from tests.core.methods import Quadratic

    return run(tmp_path, Quadratic, *plugins, **{**TOY, **options})


def model_bytes(result) -> bytes:
    """Return the model file's bytes."""
    return (Path(getattr(result, "directory", result)) / "model.safetensors").read_bytes()


def lines(result) -> list[dict]:
    """Return metrics.jsonl without what was measured."""
    records = RunDirectory(Path(getattr(result, "directory", result))).read_metrics()
    return [{key: value for key, value in record.items() if key != "time"} for record in records]


def committed(result):
    """Return the last checkpoint's state."""
    return RunDirectory(Path(getattr(result, "directory", result))).checkpoints.load()
