"""A run's figures under the names that every tracker shows them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcore import RunConfig
from fedcore.tools import flat, rounds, settings


def round_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a round's figures but for its evaluation.

    ``loss/task``, ``loss/PLUGIN.TERM``, ``bytes/down``, ``bytes/up``, ``bytes/by_plugin/SENDER/down``,
    ``seconds/PART``, ``clients/accepted``, ``clients/failed``, ``lr``; ``virtual_time`` of a simulated system,
    ``report/PLUGIN/NAME`` of a plugin that reports figures.
    """
    counts = {"accepted": record["accepted"], "failed": rounds.lost(record).total()}
    parts = {"loss": record["losses"], "bytes": record["bytes"], "seconds": record["time"], "clients": counts}
    others = {"virtual_time": record.get("virtual_time"), "report": record.get("reports", {})}
    return {"lr": float(record["lr"]), **scalars(parts), **scalars(others)}


def scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested mapping by path: ``global/accuracy``; lists, texts and None are left out.

    :param prefix: goes before each name, as in ``final/``.
    """
    return {
        prefix + name: float(value)
        for name, value in flat(values, "/")
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def parameters(config: RunConfig) -> dict[str, Any]:
    """Return what decides a run's results by name, for tables of runs: ``alpha``, ``plugins``, ``moon.mu``."""
    values = settings(config)
    plugins = values.pop("plugins")
    return {"plugins": "+".join(plugins) or "fedavg", **values, **dict(flat(plugins, "."))}
