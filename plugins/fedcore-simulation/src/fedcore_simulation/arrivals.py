"""Clients that do not wait for each other (``concurrency``): whose updates arrive when, and how old they are."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from fedcore import RunConfig, numpy_generator


@dataclass(frozen=True, slots=True)
class Buffer:
    """The updates of one server step."""

    staleness: dict[int, int]
    """Client -> server steps since it received its model, in ascending order of client ids."""
    clock: float
    """Virtual seconds from the run's start to the arrival of the last update."""


class Arrivals:
    """The buffers of a run with ``--system concurrency``, by server step.

    ``concurrency`` clients train at any time. When an update arrives, another client receives the newest model. It is
    drawn uniformly from the clients that neither train nor wait in the buffer. If the buffer then holds as many updates
    as a cohort has clients, the server steps first.

    :source: Nguyen et al., AISTATS 2022, arXiv 2106.06639, Algorithm 1, with its concurrency.
    """

    def __init__(self, config: RunConfig, concurrency: int, seconds: Callable[[int, int], float]) -> None:
        """Begin with the first clients, which all receive w_0.

        :param concurrency: the number of clients that train at any time.
        :param seconds: (server step, client) -> the seconds that the client takes with the model of this step.
        """
        self._clients, self._size, self._seconds = config.training_clients, config.cohort_size, seconds
        self._draws = numpy_generator(config.seed, "system/arrivals")
        self._buffers: list[Buffer] = []
        self._waiting: dict[int, int] = {}
        self._training: list[tuple[float, int, int]] = []  # a heap of arrival, client, the step of the client's model
        self._busy: set[int] = set()
        for _ in range(concurrency):
            self._start(0.0)

    def __getitem__(self, step: int) -> Buffer:
        """Return the buffer of a server step, from 0."""
        while len(self._buffers) <= step:
            self._take(*heapq.heappop(self._training))
        return self._buffers[step]

    def _take(self, clock: float, client: int, begun: int) -> None:
        """Put an update into the buffer, step if the buffer is full, and start another client."""
        step = len(self._buffers)
        self._waiting[client] = step - begun
        if len(self._waiting) == self._size:
            self._buffers.append(Buffer(dict(sorted(self._waiting.items())), clock))
            self._busy.difference_update(self._waiting)
            self._waiting.clear()
        self._start(clock)

    def _start(self, clock: float) -> None:
        client = int(self._draws.integers(self._clients))
        while client in self._busy:
            client = int(self._draws.integers(self._clients))
        self._busy.add(client)
        begun = len(self._buffers)
        heapq.heappush(self._training, (clock + self._seconds(begun, client), client, begun))
