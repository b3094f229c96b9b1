"""The engine of this process: it hands the runner as many clients as come together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fedcore.client.messages import ClientSite, ClientTask, Pair, SharedPayload
from fedcore.client.runtime import ClientRuntime
from fedcore.engines.dispatch import Bundle, grouped


class InProcessEngine:
    """Runs tasks in this process. Updates stay on the device if no plugin reads them."""

    workers = 1

    def __init__(self, site: ClientSite) -> None:
        self._runtime = ClientRuntime(site)
        self._shared: dict[str, SharedPayload] = {}

    def share(self, key: str, payload: SharedPayload) -> None:
        """Keep a copy of a payload under a key, on the device."""
        self._shared[key] = payload.copy_to(self._runtime.placement)

    def unshare(self, key: str) -> None:
        """Drop a payload."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks, as many at a time as the runner takes together."""
        for task in grouped(tasks, self._runtime.runner.together):
            together = task.tasks if isinstance(task, Bundle) else (task,)
            shared = self._shared.get(task.shared or "")
            outcomes = self._runtime.handle_together([each.complete() for each in together], shared)
            yield from zip(together, outcomes, strict=True)

    def own_model(self, task: ClientTask) -> nn.Module:
        """Return a copy of the client's own model, as an evaluation by this task would use it; it is on the device."""
        return self._runtime.of(task.client).own_model(task.complete(), self._shared.get(task.shared or ""))

    def close(self) -> None:
        """Drop the shared payloads and the paused clients."""
        self._shared.clear()
        self._runtime.close()
