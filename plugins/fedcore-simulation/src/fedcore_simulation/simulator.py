"""The simulated system: availability, loss and delay of clients as pure functions of seed, round and client.

No result depends on the engine or on the number of workers. Nothing waits, because time is virtual: when a client
ends is known before it trains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcore import RunConfig, SimulatedOutcome, derive_seed, numpy_generator
from fedcore.server import UNREACHED
from fedcore.tools import files, rounds
from fedcore_simulation.arrivals import Arrivals
from fedcore_simulation.system import SimulatedSystem


class Simulator:
    """Draws which clients are available, and the outcomes of the selected clients."""

    def __init__(
        self,
        options: SimulatedSystem,
        config: RunConfig,
        samples: Callable[[int], int],
        breaks: Collection[int] = (),
    ) -> None:
        """Draw the values of the whole run: the slow clients, and with ``concurrency`` the arrivals.

        :param samples: returns the number of a client's training samples.
        :param breaks: the local epochs at whose start the cohort pauses for an exchange.
        """
        self.options = options
        self._config, self._samples, self._last_break = config, samples, max(breaks, default=0)
        clients = config.training_clients
        slow = round(self.options.slow * clients)
        self.arrivals: Arrivals | None = None
        self._slow: NDArray[np.bool_] = np.zeros(clients, np.bool_)
        if slow:
            self._slow[self._stream("slow").permutation(clients)[:slow]] = True
        self._presence = lru_cache(maxsize=1)(self._draw_presence)  # of the latest round
        if self.options.concurrency is not None:
            self.arrivals = Arrivals(
                config, self.options.concurrency, lambda round, c: self.simulated(round, c).seconds
            )

    def available(self, round: int) -> Sequence[int]:
        """Return the clients that can be selected in a round, in ascending order."""
        if self.options.availability == 1:
            return range(self._config.training_clients)
        clients: list[int] = np.flatnonzero(self._presence(round)).tolist()
        return clients

    def reachable(self, round: int, client: int) -> bool:
        """Return whether a client is available in a round and answers the server."""
        options = self.options
        present = options.availability == 1 or bool(self._presence(round)[client])
        return present and not self._happens(options.no_show, "no-show", round, client)

    def simulated(self, round: int, client: int, epochs: int | None = None) -> SimulatedOutcome:
        """Return the outcome of a selected client.

        :param epochs: its local epochs, if ``select_clients`` chose them.
        """
        options = self.options
        unit, everything = self._config.local_work
        everything = everything if epochs is None else epochs
        if not self.reachable(round, client):
            return SimulatedOutcome(0, 0.0, ("unavailable", UNREACHED))
        latency = -options.latency * math.log1p(-self._uniform("latency", round, client)) if options.latency else 0.0
        completed, pace = everything, self._unit_seconds(client)
        whole = latency + everything * pace
        if self._happens(options.stragglers, "straggler", round, client):
            completed = 1 + int(self._uniform("completed", round, client) * (everything - 1))
            pace *= everything / completed
        limit = math.inf if options.deadline is None else options.deadline
        last = limit * (1 + 1e-9)  # 7 * 0.1 is more than 0.7
        if latency + completed * pace > last:
            completed = min(completed, max(0, math.floor((last - latency) / pace))) if pace else 0
        if completed == 0:
            return SimulatedOutcome(
                0, limit, ("deadline", f"completed no local {unit[:-1]} within {limit:g} virtual seconds")
            )
        if self._happens(options.dropout, "dropout", round, client):
            part = self._uniform("lost", round, client) * completed
            why = f"was lost in the course of local {unit[:-1]} {int(part) + 1} of {everything}"
            return SimulatedOutcome(int(part), latency + part * pace, ("dropped", why))
        if completed < everything and options.partial == "drop":
            why = f"completed {completed} of {everything} local {unit}; partial work is dropped"
            return SimulatedOutcome(completed, min(limit, whole), ("deadline", why))
        if completed < everything and completed <= self._last_break:
            why = (
                f"completed {completed} of {everything} local epochs, none after the exchange at epoch "
                f"{self._last_break}"
            )
            return SimulatedOutcome(completed, latency + completed * pace, ("dropped", why))
        return SimulatedOutcome(completed, latency + completed * pace)

    def arriving(self, round: int) -> dict[int, int] | None:
        """Return client -> staleness of the updates that arrive in a round; None without ``concurrency``."""
        return None if self.arrivals is None else self.arrivals[round].staleness

    def round_seconds(self, round: int, simulated: Iterable[SimulatedOutcome]) -> float:
        """Return the seconds of a round: until the last client answered or is known to be lost, at most the deadline.

        A round without clients lasts until the deadline; without a deadline it takes no time. With ``concurrency`` a
        round lasts from the server's last step to the arrival of the round's last update.
        """
        if self.arrivals is not None:
            return self.arrivals[round].clock - (self.arrivals[round - 1].clock if round else 0.0)
        return max((outcome.seconds for outcome in simulated), default=self.options.deadline or 0.0)

    def record(
        self,
        round: int,
        simulated: Mapping[int, SimulatedOutcome],
        took_part: Sequence[int],
        work: Mapping[int, int],
    ) -> dict[str, Any]:
        """Return how many clients were available, who took part, and with how much work."""
        (_, everything), staleness = self._config.local_work, self.arriving(round)
        completed = {client: simulated[client].completed for client in took_part}
        return {
            "available": len(self.available(round)),
            "took_part": took_part,
            "partial": {str(client): done for client, done in completed.items() if done < work.get(client, everything)},
            "seconds": self.round_seconds(round, simulated.values()),
            **({"staleness": {str(client): tau for client, tau in staleness.items()}} if staleness else {}),
        }

    def totals(self, file: files.RecordFile) -> dict[str, Any]:
        """Return the sums over a run's rounds: selected clients, used updates, partial updates among these, losses."""
        selected = accepted = partial = 0
        kinds: Counter[str] = Counter()
        clock = 0.0
        for record in file.read():
            if "system" in record:
                selected += len(record["cohort"])
                accepted += record["accepted"]
                partial += len(record["system"]["partial"])
                kinds.update(rounds.lost(record))
                clock = record["virtual_time"]
        return {
            "selected": selected,
            "accepted": accepted,
            "partial": partial,
            "lost": dict(sorted(kinds.items())),
            "virtual_time": clock,
        }

    def _unit_seconds(self, client: int) -> float:
        """Return the seconds of a client's local epoch; with ``--local-steps``, of an optimizer step."""
        epoch = self._config.batches(self._samples(client))
        batches = epoch if self._config.local_steps is None else 1
        return batches * self.options.step_seconds * (self.options.slow_factor if self._slow[client] else 1.0)

    def _draw_presence(self, round: int) -> NDArray[np.bool_]:
        """Return for each client whether it is available."""
        clients, options = self._config.training_clients, self.options
        if options.day is None:
            return self._stream("available", round).random(clients) < options.availability
        hour: NDArray[np.float64] = (self._stream("hours").random(clients) + round / options.day) % 1.0
        return hour < options.availability

    def _stream(self, purpose: str, round: int | None = None) -> np.random.Generator:
        return numpy_generator(self._config.seed, f"system/{purpose}", round=round)

    def _uniform(self, purpose: str, round: int, client: int) -> float:
        """Return a number in [0, 1) from a stream of this round and client."""
        drawn = derive_seed(self._config.seed, f"system/{purpose}", round=round, client=client)
        return (drawn >> 10) / (1 << 53)  # 63 bits would round up to 1

    def _happens(self, chance: float, purpose: str, round: int, client: int) -> bool:
        return chance > 0 and self._uniform(purpose, round, client) < chance
