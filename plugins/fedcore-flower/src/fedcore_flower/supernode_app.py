"""Flower's SuperNode, with shorter pauses between its requests for messages.

Flower has no option for these pauses. An idle SuperNode sleeps 3 s between two requests, and 0.5 s while it waits for
an answer. A round of two messages then takes 9 s, even if there is nothing to compute.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

from fedcore_flower.child import installed_command

LONGEST_SLEEP = 0.25
"""The longest pause in seconds. A request for messages is small, and its connection stays open."""


def main() -> None:
    """Run the command ``flower-supernode`` with its arguments."""
    from flwr.supernode import start_client_internal as loop

    assert vars(loop)["time"] is time, "the loop of Flower's SuperNode has changed"
    vars(loop)["time"] = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LONGEST_SLEEP)))
    installed_command("flower-supernode")()
