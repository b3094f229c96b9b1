"""The evaluation protocols: which model is measured on which samples. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Protocol(NamedTuple):
    """A row of a run's metrics.

    :param name: the key in metrics.jsonl and summary.json.
    :param heading: what it measures, for a table.
    :param measures: the same for a sentence.
    :param on_clients: whether the clients measure it; it then has figures by client.
    :param held_out: whether the samples are the clients' held-out parts, not the server's test set.
    :param own_model: whether the model is the client's own, not the global one.
    """

    name: str
    heading: str
    measures: str
    on_clients: bool = False
    held_out: bool = False
    own_model: bool = False


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("global", "global model on the test set", "the global model on the server's test set"),
        Protocol(
            "global_local",
            "global model on held-out parts",
            "the global model on each client's held-out part",
            on_clients=True,
            held_out=True,
        ),
        Protocol(
            "personal",
            "own models on held-out parts",
            "each client's own model on its held-out part",
            on_clients=True,
            held_out=True,
            own_model=True,
        ),
        Protocol(
            "personal_global",
            "own models on the test set",
            "each client's own model on the server's test set",
            on_clients=True,
            own_model=True,
        ),
        Protocol(
            "global_before_correction",
            "before the correction",
            "the global model on the server's test set before post_train changed it",
        ),
    )
}
"""By name, in the order in which they are shown."""

EVALUATED = tuple(name for name in PROTOCOLS if name != "global_before_correction")
"""The protocols of an evaluation; the figures before a correction are those of an earlier one."""

ON_CLIENTS = tuple(name for name, protocol in PROTOCOLS.items() if protocol.on_clients)

VALIDATION = ("personal", "global_local")
"""Protocols on held-out parts, by which the best round is chosen: the first that a run has."""


def confusion_key(protocol: str) -> str:
    """Return the key of a protocol's confusion matrix in summary.json."""
    return "confusion" if protocol == "global" else f"confusion_{protocol}"
