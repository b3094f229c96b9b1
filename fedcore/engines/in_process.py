"""The engine of this process: it hands the runner as many clients as come together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from fedcore.base import registry
from fedcore.base.errors import ConfigError
from fedcore.client.messages import ClientSite, ClientTask, Engine, Pair, SharedPayload
from fedcore.client.runtime import ClientRuntime
from fedcore.models.placement import resolve_device


def LocalEngine(site: ClientSite) -> Engine:  # noqa: N802 - named by an entry point as a class
    """Return the default engine for the run's device and number of workers: this process, or worker processes.

    :raises ConfigError: the run has workers, and the package that brings them is not installed.
    """
    device, workers = resolve_device(site.config.device), site.config.workers
    if workers == 0 or (workers is None and (device.type == "cuda" or "workers" not in registry.available("engine"))):
        if site.config.client_timeout is not None:
            raise ConfigError("--client-timeout needs worker processes, which can be killed: --workers 1 or more")
        return InProcessEngine(site)
    engine: Engine = registry.needed("engine", "workers", f"--workers {workers}")(site)
    return engine


class InProcessEngine:
    """Runs tasks in this process. Updates stay on the device if no plugin reads them."""

    workers = 1

    def __init__(self, site: ClientSite) -> None:
        self._runtime = ClientRuntime(site)
        self.together = self._runtime.runner.together
        """See :class:`~fedcore.client.messages.Engine`."""
        self._shared: dict[str, SharedPayload] = {}

    def share(self, key: str, payload: SharedPayload) -> None:
        """Keep a copy of a payload under a key, on the device."""
        self._shared[key] = payload.copy_to(self._runtime.placement)

    def unshare(self, key: str) -> None:
        """Drop a payload."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks, as many at a time as the runner takes together."""
        for group in groups_of(tasks, self.together):
            shared = self._shared.get(group[0].shared or "")
            outcomes = self._runtime.handle_together([task.complete() for task in group], shared)
            yield from zip(group, outcomes, strict=True)

    def close(self) -> None:
        """Drop the shared payloads and the paused clients."""
        self._shared.clear()
        self._runtime.close()


def groups_of(tasks: Iterable[ClientTask], most: int) -> Iterator[list[ClientTask]]:
    """Join trainings of neighbours, up to ``most``. Who is joined depends on nothing else, as bits depend on it."""
    for (kind, *_), neighbours in itertools.groupby(tasks, alike):
        size = most if kind == "fit_begin" else 1
        while group := list(itertools.islice(neighbours, size)):
            yield group


def alike(task: ClientTask) -> tuple[str, str | None, str]:
    """Return what tasks of one group have in common; a task that cannot be in one has it with no other."""
    plain = task.session is None and task.compute is None and not task.tensors
    return task.kind, task.shared, "" if plain else task.id
