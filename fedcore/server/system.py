"""What the server asks of the clients' devices and connections: who is there, who arrives, and when.

By default everybody is there. A package brings a simulated system by the options that it adds to a run
(:meth:`fedcore.Section.simulated`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fedcore.base.files import RecordFile
from fedcore.client.messages import FailureKind

UNREACHED = "could not be reached when the round began"
"""The message of the failure ``unavailable``."""


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """The simulated outcome of one selected client in one round."""

    completed: int
    """The number of whole local epochs that the client completes; with ``--local-steps``, of optimizer steps."""
    seconds: float
    """Virtual seconds until the server has the update, or knows that there will be no update."""
    failure: tuple[FailureKind, str] | None = None
    """Why there is no update, as a kind and a message; None if there is an update."""

    @property
    def reached(self) -> bool:
        """Whether the client could be reached when the round began."""
        return self.failure is None or self.failure[0] != "unavailable"


class System(Protocol):
    """A system in a run. Its answers are pure functions of their arguments, for a resumed run asks anew."""

    def available(self, round: int) -> Sequence[int]:
        """Return the clients that can be selected in a round, in ascending order."""

    def reachable(self, round: int, client: int) -> bool:
        """Return whether a client is available in a round and answers the server."""

    def simulated(self, round: int, client: int, epochs: int | None = None) -> SimulatedOutcome:
        """Return the outcome of a selected client.

        :param epochs: its local epochs, if ``select_clients`` chose them.
        """

    def arriving(self, round: int) -> Mapping[int, int] | None:
        """Return the clients whose updates arrive, ascending, with the server steps since each received its model.

        None if clients wait for each other: then ``select_clients`` chooses the cohort.
        """

    def round_seconds(self, round: int, simulated: Iterable[SimulatedOutcome]) -> float:
        """Return the virtual seconds of a round with these outcomes."""

    def record(
        self, round: int, simulated: Mapping[int, SimulatedOutcome], took_part: Sequence[int], work: Mapping[int, int]
    ) -> dict[str, Any]:
        """Return what the record of a round says of the system.

        :param simulated: the outcomes of the selected clients.
        :param took_part: the clients whose updates were accepted, in ascending order.
        :param work: the local epochs or steps of clients for which ``select_clients`` chose them.
        """

    def totals(self, file: RecordFile) -> dict[str, Any]:
        """Return what the summary of a run says of the system, from the file of its rounds' records."""


@dataclass(frozen=True)
class Everybody:
    """All clients are there in every round and complete their work, in no time."""

    clients: int
    """How many clients train."""
    work: int
    """Local epochs or steps of a round."""

    def available(self, round: int) -> Sequence[int]:
        """Return all clients that train."""
        return range(self.clients)

    def reachable(self, round: int, client: int) -> bool:
        """Return True."""
        return True

    def simulated(self, round: int, client: int, epochs: int | None = None) -> SimulatedOutcome:
        """Return that a client completes its work."""
        return SimulatedOutcome(self.work if epochs is None else epochs, 0.0)

    def arriving(self, round: int) -> None:
        """Return None: clients wait for each other."""

    def round_seconds(self, round: int, simulated: Iterable[SimulatedOutcome]) -> float:
        """Return 0."""
        return 0.0

    def record(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: there is no simulated system to record."""
        return {}

    totals = record
