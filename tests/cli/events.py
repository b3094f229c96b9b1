"""Canned events of a run: what ``run`` hands to ``notify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcore.base.config import RunConfig


def start(directory: Path = Path("/runs/one"), *, round_: int = 0, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    config = RunConfig.create({"plugins": ["moon"], "model": "mlp", "clients": 4, "rounds": 3})
    return {"directory": directory, "config": config, "round": round_, "notes": list(notes)}


def failure(client: int, kind: str, message: str) -> dict[str, Any]:
    return {"client": client, "kind": kind, "message": message}


def record(
    round_: int, *, failures: tuple[dict[str, Any], ...] = (), losses: dict[str, float] | None = None, **metrics: Any
) -> dict[str, Any]:
    return {
        "round": round_,
        "lr": 0.05,
        "cohort": [0, 1, 2, 3],
        "accepted": 4 - len(failures),
        "failures": list(failures),
        "losses": losses or {"moon.contrast": 0.25, "task": 1.5},
        "bytes": {"down": 10, "up": 10, "by_plugin": {}},
        "metrics": {"global": {"accuracy": 0.5, "loss": 1.0}, **metrics} if metrics != {"none": True} else None,
        "time": {"round": 1.5, "evaluation": 0.5},
    }


def summary() -> dict[str, Any]:
    spread = {"std": 0.01, "worst10": 0.8, "clients": 4, "untrained": 1}
    return {
        "run_dir": "/runs/one",
        "plugins": ["moon"],
        "rounds": 3,
        "seconds": 65.0,
        "metrics": {
            "global": {"accuracy": 0.9306, "loss": 0.1234, "samples": 10, "per_class": [1.0]},
            "global_local": {"accuracy": 0.91, "loss": 0.2, **spread},
            "personal": {"accuracy": 0.955, "loss": 0.15, **spread},
            "personal_global": {"accuracy": 0.7, "loss": 0.9, **spread},
            "global_before_correction": {"accuracy": 0.92, "loss": 0.13},
            "best_by_validation": {
                "round": 1,
                "validation": "personal",
                "validation_accuracy": 0.96,
                "global_accuracy": 0.94,
            },
        },
        "bytes": {
            "down": 3_000_000,
            "up": 1_500_000,
            "by_plugin": {"model": {"down": 2_400_000, "up": 1_500_000}, "scaffold": {"down": 600_000, "up": 0}},
            "per_round": {"down": 1_000_000.0, "up": 500_000.0},
        },
        "time": {
            "per_round": {
                "round": 20.0,
                "local_training": 19.0,
                "selection": 0.01,
                "broadcast": 0.09,
                "collection": 0.4,
                "aggregation": 0.5,
                "checkpoint": 0.6,
                "idle_workers": 10.0,
                "evaluation": 0.4,
                "client_seconds": 40.0,
                "plugin_terms": {"moon": 4.0},
            },
            "workers": 2,
            "peak_memory_mib": 412.3,
        },
    }
