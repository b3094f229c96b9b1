"""Flower's SuperNode, with shorter pauses between its requests for messages.

Flower 1.42 has no option for these pauses. An idle SuperNode sleeps 3 s between two requests, and 0.5 s while it waits
for an answer. A round of two messages then takes 9 s, even if there is nothing to compute.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

LONGEST_SLEEP = 0.25
"""The longest pause in seconds. A request for messages is small, and its connection stays open."""


def main() -> None:
    """Run the SuperNode with the arguments of ``flower-supernode``."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    assert vars(loop)["time"] is time, "Flower's SuperNode has changed; this package needs Flower 1.42"
    vars(loop)["time"] = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LONGEST_SLEEP)))
    flower_supernode()
