"""One call of a hook as the conformance kit sees it, the rules for it, and what breaks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from fedcore import Plugin
from fedcore.client import BatchStep, SessionContext, context_of
from fedcore.hooks import QUESTION

IN_A_STEP = ("task_loss", "local_loss", "gradients", "observe")
SENT = ("end_local", "broadcast", "broadcast_to", QUESTION, "pre_answer", "pre_upload", "guard_upload")


class Rule(Enum):
    """A rule for hooks."""

    RANDOM_STATE = auto()
    SETTINGS = auto()
    SELF = auto()
    INPUTS = auto()
    MODEL = auto()
    HOST_SYNC = auto()
    LOSS = auto()
    PAYLOAD = auto()
    GRADIENTS = auto()
    SAMPLES = auto()
    SCRATCH = auto()
    BROADCAST = auto()


@dataclass(frozen=True)
class Finding:
    """One broken rule.

    :param what: the observation; the message starts with the hook's name.
    """

    rule: Rule
    hook: str
    what: str


@dataclass(frozen=True)
class Call:
    """One call of a hook, as sensors see it.

    :param idle: term -> in how many steps of the run it had a value, but a gradient of 0 only.
    """

    hook: str
    plugin: Plugin
    arguments: Mapping[str, Any]
    report: Callable[[Rule, str], None]
    idle: dict[str, float]

    @property
    def client(self) -> SessionContext | None:
        """The client at work; None on the server."""
        step = self.arguments.get("step")
        client = self.arguments.get("client")
        if isinstance(step, BatchStep):
            client = context_of(step._batch.session, step._plugin)
        return client if isinstance(client, SessionContext) else None  # on the server ``broadcast_to`` takes an id
