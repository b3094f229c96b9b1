"""The engine of this process: one client or stack after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fedcore.client.messages import ClientSite, ClientTask, Pair, SharedPayload
from fedcore.client.runtime import ClientRuntime
from fedcore.client.stack_runner import handler
from fedcore.engines.dispatch import Bundle, stacked


class InProcessEngine:
    """Runs every task or stack in this process, one by one. Updates stay on the device if no plugin reads them."""

    workers = 1

    def __init__(self, site: ClientSite) -> None:
        self._runtime = ClientRuntime(site)
        self._runtimes = [self._runtime]
        self._handle, self._stack = handler(self._runtime), site.config.stack_size
        self._shared: dict[str, SharedPayload] = {}

    def share(self, key: str, payload: SharedPayload) -> None:
        """Keep a copy of a payload under a key, on the device."""
        self._shared[key] = payload.copy_to(self._runtime.placement)

    def unshare(self, key: str) -> None:
        """Drop a payload."""
        self._shared.pop(key, None)

    def run(self, tasks: Iterable[ClientTask], *, window: int | None = None) -> Iterator[Pair]:
        """Run tasks one by one, or stack by stack."""
        for task in stacked(tasks, self._stack):
            together = task.tasks if isinstance(task, Bundle) else (task,)
            outcomes = self._handle([each.complete() for each in together], self._shared.get(task.shared or ""))
            yield from zip(together, outcomes, strict=True)

    def own_model(self, task: ClientTask) -> nn.Module:
        """Return a copy of the client's own model, as an evaluation by this task would use it; it is on the device."""
        return self._runtime.of(task.client).own_model(task.complete(), self._shared.get(task.shared or ""))

    def close(self) -> None:
        """Drop the shared payloads and the paused clients."""
        self._shared.clear()
        for runtime in self._runtimes:
            runtime.close()
