"""The evaluation protocols: which model is measured on which samples. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class EvaluationProtocol(NamedTuple):
    """A row of a run's metrics."""

    name: str
    """The key in metrics.jsonl and summary.json."""
    heading: str
    """Model and samples, for a table."""
    measures: str
    """Model and samples, for a sentence."""
    held_out: bool = False
    """Whether the samples are of the clients' held-out parts instead of the server's test set."""
    validation: bool = False
    """Whether they are the share of these parts that chooses the best round, which the other protocols leave out."""
    own_model: bool = False
    """Whether the model is the client's own instead of the global one."""

    @property
    def on_clients(self) -> bool:
        """Whether the clients measure it: they have the held-out parts and their models. It has figures by client."""
        return self.held_out or self.own_model


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        EvaluationProtocol("global", "global model on the test set", "the global model on the server's test set"),
        EvaluationProtocol(
            "mean_domain",
            "global model, mean over domains",
            "the global model on the test samples of each domain, and the figures' mean over the domains",
        ),
        EvaluationProtocol(
            "worst_domain",
            "global model, worst domain",
            "the global model on the test samples of each domain, and each figure's worst value over the domains",
        ),
        EvaluationProtocol(
            "unseen_domain",
            "global model on the unseen domain",
            "the global model on the test samples of the domain that no client holds",
        ),
        EvaluationProtocol(
            "global_local",
            "global model on held-out parts",
            "the global model on each client's held-out part",
            held_out=True,
        ),
        EvaluationProtocol(
            "personal",
            "own models on held-out parts",
            "each client's own model on its held-out part",
            held_out=True,
            own_model=True,
        ),
        EvaluationProtocol(
            "personal_global",
            "own models on the test set",
            "each client's own model on the server's test set",
            own_model=True,
        ),
        EvaluationProtocol(
            "global_validation",
            "global model on validation parts",
            "the global model on the validation share of each client's held-out part",
            held_out=True,
            validation=True,
        ),
        EvaluationProtocol(
            "personal_validation",
            "own models on validation parts",
            "each client's own model on the validation share of its held-out part",
            held_out=True,
            validation=True,
            own_model=True,
        ),
        EvaluationProtocol(
            "unseen",
            "unseen clients, held-out parts",
            "the model that a client receives before it ever trains, on the held-out part of each unseen client",
            held_out=True,
        ),
        EvaluationProtocol(
            "unseen_adapted",
            "unseen clients after adaptation",
            "each unseen client's own model after its adaptation, on its held-out part",
            held_out=True,
            own_model=True,
        ),
        EvaluationProtocol(
            "global_before_correction",
            "before the correction",
            "the global model on the server's test set before post_train changed it",
        ),
    )
}
"""All protocols by name, in the order of tables."""

EVALUATED = tuple(name for name in PROTOCOLS if name != "global_before_correction")
"""The protocols of an evaluation. The figures before a correction come from an earlier evaluation."""

ON_CLIENTS = tuple(name for name, protocol in PROTOCOLS.items() if protocol.on_clients)
"""The protocols that the clients measure."""

HELD_OUT = ("personal", "global_local")
"""The reported protocols on held-out parts, of own models first."""

VALIDATION = ("personal_validation", "global_validation", *HELD_OUT)
"""Protocols on held-out parts. The first of them that a run measures chooses the best round; with ``--keep best`` it is
the first of the global model, which is kept."""

SIGNS = {"accuracy": 1, "mean": 1, "worst10": 1, "best10": 1, "std": -1, "loss": -1}
"""Figure of a protocol -> 1 if more is better, -1 if less is."""

FIGURES = frozenset(
    {"accuracy", "loss", "loss_reason", "samples", "undefined", "per_class"}
    | {"mean", "std", "worst10", "best10", "quantiles", "clients", "untrained", "per_client"}
    | {"domain", "domains", "domain_of", "mean_over"}
)
"""The names in a protocol's figures. No metric has one of them."""

OF_METRIC = ("_mean", "_std", "_per_client", "_domains")
"""The ends of a metric's own figures, such as ``auroc_mean``. No metric's name ends so."""


def further(figures: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics next to accuracy and loss in a protocol's figures."""
    return [name for name in figures if name not in FIGURES and not name.endswith(OF_METRIC)]


def figure_of(figures: Mapping[str, Any]) -> str:
    """Return the figure by which models are compared: accuracy, else the task's first, else the loss."""
    return next(iter(("accuracy",) if "accuracy" in figures else (*further(figures), "loss")))


def confusion_key(protocol: str) -> str:
    """Return the key of a protocol's confusion matrix in summary.json."""
    return "confusion" if protocol == "global" else f"confusion_{protocol}"
