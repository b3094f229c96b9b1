"""The tensors that a plugin sends, recorded in a run of two rounds on the bundled digits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedcore.base.config import RunConfig
from fedcore.client.messages import ClientFailure, ClientTask, Outcome
from fedcore.engines.in_process import InProcessEngine
from fedcore.runs.experiment import run
from fedcore_testing.federation import needs_of

Shapes = dict[str, list[int]]


class Traffic(NamedTuple):
    """The tensors that were sent beside the model.

    :param tensors: way -> name -> shape. Ways: ``down, before training``, ``up``, ``up, answer``, ``down, question``,
        ``up, exchange`` and ``down, exchange``.
    :param bytes: ``down`` and ``up`` of all rounds and clients, as the ledger counts them for the plugin.
    """

    tensors: dict[str, Shapes]
    bytes: dict[str, int]


class Watch(InProcessEngine):
    """The in-process engine; records every tensor that is sent beside the model."""

    seen: dict[str, Shapes]

    def share(self, key: str, tensors: Mapping[str, Tensor], meta: Any) -> None:
        """Record and share a payload."""
        self._note("down, before training", tensors, "broadcast/")
        super().share(key, tensors, meta)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[tuple[ClientTask, Outcome]]:
        """Run tasks and record their tensors."""
        for task, outcome in super().run(tasks, window=window):
            if task.kind == "fit_begin":
                self._note(
                    "down, before training", {f"broadcast/{name}": t for name, t in task.tensors.items()}, "broadcast/"
                )
            if task.kind in ("ask", "fit_resume"):
                self._note("down, question" if task.kind == "ask" else "down, exchange", task.tensors)
            if not isinstance(outcome, ClientFailure):
                kind = "up, answer" if task.kind == "ask" else "up, exchange" if "paused" in outcome.meta else "up"
                self._note(kind, outcome.tensors, "payload/" if kind == "up" else "")
            yield task, outcome

    def _note(self, way: str, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                short = name.removeprefix(prefix).partition("/")[2] if prefix else name
                self.seen.setdefault(way, {})[short] = list(tensor.shape)


def watch(plugin: str, options: Mapping[str, Any] | None = None) -> Traffic:
    """Return the tensors that a plugin sends beside the model.

    Two rounds, two clients and ten classes on digits with ``mlp``: shapes that depend on the data or the model are
    those of this run.
    """
    seen: dict[str, Shapes] = {}
    engine = type("Watching", (Watch,), {"seen": seen})
    with tempfile.TemporaryDirectory(prefix="fedcore-") as folder:
        config = RunConfig(
            plugins={plugin: dict(options or {})},
            clients=2,
            rounds=2,
            local_epochs=2,
            batch_size=256,
            partition="iid",
            workers=0,
            out=Path(folder) / "run",
            **needs_of((plugin, options or {})),
        )
        result = run(config, engine=engine)
    return Traffic(seen, result.summary["bytes"]["by_plugin"].get(plugin, {"down": 0, "up": 0}))
