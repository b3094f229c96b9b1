"""Clients that train without waiting for each other: which updates the server has for a step, and how old they are.

How long a virtual client takes is known before it trains, so the order of arrival is a pure function of the
configuration and the clients' sizes: nothing waits, and no result depends on the machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from fedcore.base.config import RunConfig
from fedcore.base.seeding import numpy_generator


@dataclass(frozen=True, slots=True)
class Buffer:
    """The updates of one server step.

    :param staleness: client -> server steps that were taken since it got its model, in ascending client id.
    :param clock: virtual seconds from the run's start to the arrival of the last of them.
    """

    staleness: dict[int, int]
    clock: float


class Arrivals:
    """The buffers of a run with ``--system concurrency``, by server step.

    So many clients train at any time. Whenever one's update arrives, another client, drawn uniformly from those that
    neither train nor wait in the buffer, gets the newest model; when a cohort's number of updates is there, the server
    steps first.

    :source: Nguyen et al., AISTATS 2022, arXiv 2106.06639, Algorithm 1, with its concurrency.
    """

    def __init__(self, config: RunConfig, concurrency: int, seconds: Callable[[int, int], float]) -> None:
        """Begin with the first clients, all of which get w_0.

        :param seconds: (server step, client) -> how long a client that gets that step's model takes.
        """
        self._clients, self._size, self._seconds = config.clients, config.cohort_size, seconds
        self._draws = numpy_generator(config.seed, "system/arrivals")
        self._buffers: list[Buffer] = []
        self._waiting: dict[int, int] = {}
        self._training: list[tuple[float, int, int]] = []  # a heap: arrival, client, the step whose model it has
        self._busy: set[int] = set()
        for _ in range(concurrency):
            self._start(0.0)

    def __getitem__(self, step: int) -> Buffer:
        """Return the buffer of a server step, from 0."""
        while len(self._buffers) <= step:
            self._take(*heapq.heappop(self._training))
        return self._buffers[step]

    def _take(self, clock: float, client: int, begun: int) -> None:
        """Put an update into the buffer, step if that is full, and let another client start."""
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
