"""The tensors that a plugin sends, recorded in a run of two rounds on the bundled digits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcore import ClientUpdate, RunConfig, Tensors, run
from fedcore.engines import ClientSite, ClientTask, InProcessEngine, Pair, Pause, Reply, SharedPayload
from fedcore_testing.federation import needs_of

Shapes = dict[str, list[int]]


class Traffic(NamedTuple):
    """The tensors that were sent next to the model.

    :param tensors: way -> name -> shape. Ways: ``down, before training``, ``up``, ``up, answer``, ``down, question``,
        ``up, exchange`` and ``down, exchange``.
    :param bytes: ``down`` and ``up`` of all rounds and clients, as the ledger counts them for the plugin.
    """

    tensors: dict[str, Shapes]
    bytes: dict[str, int]


class Watch(InProcessEngine):
    """The in-process engine; records every tensor that is sent next to the model."""

    def __init__(self, site: ClientSite, shapes: dict[str, Shapes]) -> None:
        super().__init__(site)
        self.shapes = shapes

    def share(self, key: str, payload: SharedPayload) -> None:
        """Record and share a payload."""
        self._note("down, before training", *payload.received.values())
        super().share(key, payload)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks and record their tensors."""
        for task, outcome in super().run(tasks, window=window):
            if task.kind == "fit_begin":
                sent = task.complete().tensors
                self._note("down, before training", {path.partition("/")[2]: sent[path] for path in sent})
            elif task.kind != "evaluate":
                self._note("down, question" if task.kind == "ask" else "down, exchange", task.tensors)
            if isinstance(outcome, ClientUpdate):
                self._note("up", *outcome.payload.values())
            elif isinstance(outcome, (Pause, Reply)):
                self._note("up, exchange" if isinstance(outcome, Pause) else "up, answer", outcome.tensors)
            yield task, outcome

    def _note(self, way: str, *sent: Tensors) -> None:
        for tensors in sent:
            for name, tensor in tensors.items():
                self.shapes.setdefault(way, {})[name] = list(tensor.shape)


def watch(plugin: str, options: Mapping[str, Any] | None = None) -> Traffic:
    """Return the tensors that a plugin sends next to the model.

    Two rounds, two clients and ten classes on digits with ``mlp``: shapes that depend on the data or the model are
    this run's.
    """
    shapes: dict[str, Shapes] = {}
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
        result = run(config, engine=lambda site: Watch(site, shapes))
    return Traffic(shapes, result.summary["bytes"]["by_plugin"].get(plugin, {"down": 0, "up": 0}))
