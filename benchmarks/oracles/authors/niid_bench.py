"""NIID-Bench: its partitions, and federations in which its functions train the clients."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import whole
from cases import Fixture, partition_figures
from torch import nn

from authors import modules
from authors.pfllib import flat

COMMIT = "61b901a"
UNUSED = ("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.utils", "datasets", "config")
EPOCHS = whole.EPOCHS

C = Fixture(
    "niid_bench",
    "NIID-Bench",
    of=f"git {COMMIT}",
    source="run of its partitions, and of its local training; its loop over the rounds is a script, and was written "
    "here by the paper's mean",
)
C.difference(
    "correction outside the momentum",
    "decision",
    "NIID-Bench takes a step of SGD with momentum and then moves by eta (c - c_i), and divides by the number of steps; "
    "fedcore adds c - c_i to the gradient, and divides by the sum of the steps' weights.",
    follows="both (the paper has no momentum)",
    where="experiments.py: train_net_scaffold",
    option="none; momentum 0 agrees",
)


class Split(nn.Module):
    """The network of ``whole``; with features it returns what NIID-Bench's MOON expects."""

    def __init__(self, *, features: bool) -> None:
        super().__init__()
        self.layers, self.features = whole.model(), features

    def forward(self, x: torch.Tensor) -> Any:
        """Return logits, or features twice and logits."""
        z = self.layers[1](self.layers[0](x))
        return (z, z, self.layers[2](z)) if self.features else self.layers[2](z)


def federation(
    train: Callable[[int, nn.Module, nn.Module, tuple[Any, ...]], Any], *, features: bool = False
) -> tuple[nn.Module, list[list[tuple[int, Any]]]]:
    """Return the model after all rounds by the mean of samples, and what each round's local trainings returned."""
    received, returned = Split(features=features), []
    for cohort in whole.COHORTS:
        trained, answers = [], []
        for client in cohort:
            own = Split(features=features)
            own.load_state_dict(received.state_dict())
            x, y = whole.samples(client)
            answers.append((client, train(client, own, received, ((x, y),))))
            trained.append((len(y), own.state_dict()))
        total = sum(size for size, _ in trained)
        mean = {key: sum(size / total * some[key] for size, some in trained) for key in trained[0][1]}
        received = Split(features=features)
        received.load_state_dict(mean)
        returned.append(answers)
    return received, returned


def write() -> None:
    """Run the cases and write the fixture."""
    found = modules(
        "Xtra-Computing/NIID-Bench", COMMIT, ".", "experiments", "utils", without=(*UNUSED, "models.mnist_model")
    )
    experiments, utils = found
    logging.disable(logging.CRITICAL)
    experiments.compute_accuracy = lambda *_, get_confusion_matrix=False, **__: (
        (0.0, None) if get_confusion_matrix else 0.0
    )
    rates = SimpleNamespace(rho=0.0, reg=0.0, lr=whole.LR, loss="contrastive")
    experiments.args = rates

    add = partial(whole.add, C)

    def local(name: str, **named: Any) -> Callable[..., Any]:
        function = getattr(experiments, f"train_net{name}")
        return lambda client, own, received, data: function(
            client, own, *([received] if name else []), data, data, EPOCHS, whole.LR, "sgd", **named
        )

    for rho in (0.0, 0.9):
        rates.rho, options = rho, {"momentum": rho}
        model, _ = federation(local(""))
        add(f"FedAvg, momentum {rho}", flat(model), {}, options=options)
        model, _ = federation(local("_fedprox", mu=0.4))
        add(f"FedProx, mu .4, momentum {rho}", flat(model), {"fedprox": {"mu": 0.4}}, options=options)
    before: dict[int, nn.Module] = {}

    def contrast(client: int, own: nn.Module, received: nn.Module, data: tuple[Any, ...]) -> None:
        previous = [before.get(client, received)]
        experiments.train_net_moon(
            client, own, received, previous, data, data, EPOCHS, whole.LR, "sgd", 2.0, 0.5, rates, 0
        )
        before[client] = Split(features=True)
        before[client].load_state_dict(own.state_dict())

    model, _ = federation(contrast, features=True)
    plugins = {"moon": {"mu": 2.0, "temperature": 0.5, "projection": False}}
    add("MOON, mu 2, tau .5, momentum .9", flat(model), plugins, options={"momentum": 0.9})
    for rho in (0.0, 0.9):
        rates.rho = rho
        said = "" if rho == 0 else "correction outside the momentum"
        plugins = {"scaffold": {"weighting": "uniform"}}
        add(f"SCAFFOLD, momentum {rho}", scaffold(experiments), plugins, options={"momentum": rho}, differs=said)
        model = fednova(experiments)
        add(f"FedNova, momentum {rho}", model, {"fednova": {}}, options={"momentum": rho})
        for steps in (2, 5):
            own, received = Split(features=False), Split(features=False)
            x, y = whole.samples(0)
            data = ((x, y),)
            answer = experiments.train_net_fednova(0, own, received, data, data, steps, 0.01, "sgd")
            C.add(
                "FedNova", f"a_i of {steps} steps, momentum {rho}", "fednova_norm", answer[2], steps=steps, momentum=rho
            )
    partitions(utils)
    C.write()


def scaffold(experiments: Any) -> torch.Tensor:
    """Return the weights of a SCAFFOLD run: clients count the same, as in the paper."""

    def zeros() -> nn.Module:
        made = Split(features=False)
        made.load_state_dict({key: torch.zeros_like(value) for key, value in made.state_dict().items()})
        return made

    received, shared = Split(features=False), zeros()
    controls = [zeros() for _ in whole.parts]
    for cohort in whole.COHORTS:
        trained, changes = [], []
        for client in cohort:
            own = Split(features=False)
            own.load_state_dict(received.state_dict())
            x, y = whole.samples(client)
            data = ((x, y),)
            *_, change = experiments.train_net_scaffold(
                client, own, received, controls[client], shared, data, data, EPOCHS, whole.LR, "sgd"
            )
            trained.append(own.state_dict())
            changes.append(change)
        received, moved = Split(features=False), shared.state_dict()
        received.load_state_dict({key: sum(some[key] for some in trained) / len(cohort) for key in trained[0]})
        shared = zeros()
        shared.load_state_dict(
            {key: moved[key] + sum(change[key] for change in changes) / len(whole.parts) for key in moved}
        )
    return flat(received)


def fednova(experiments: Any) -> torch.Tensor:
    """Return the weights of a FedNova run: the server's step by the paper's Eq. 7."""
    received = Split(features=False)
    for cohort in whole.COHORTS:
        answers = []
        for client in cohort:
            own = Split(features=False)
            own.load_state_dict(received.state_dict())
            x, y = whole.samples(client)
            data = ((x, y),)
            _, _, norm, direction = experiments.train_net_fednova(
                client, own, received, data, data, EPOCHS, whole.LR, "sgd"
            )
            answers.append((len(y), norm, direction))
        total = sum(size for size, _, _ in answers)
        effective = sum(size / total * norm for size, norm, _ in answers)
        start, received = received.state_dict(), Split(features=False)
        received.load_state_dict(
            {
                key: value - effective * sum(size / total * step[key] for size, _, step in answers)
                for key, value in start.items()
            }
        )
    return flat(received)


def partitions(utils: Any) -> None:
    """Add its partitions, by figures that hold whatever the draws."""
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    utils.load_mnist_data = lambda _: (None, labels, None, labels)
    utils.record_net_data_stats = lambda *_: None
    known = [int(one) for one in labels]
    whole_parts = ["every sample once"]
    for name, scheme, figures, options in (
        ("homo", "iid", ["sizes", *whole_parts], {}),
        ("noniid-labeldir", "niid-bench", ["at least ten each", "sizes differ", *whole_parts], {"alpha": 0.5}),
        (
            "noniid-#label1", "classes", ["most classes", "client k has class k mod C", *whole_parts],
            {"classes_per_client": 1},
        ),
        (
            "noniid-#label2", "classes", ["at most two classes", "client k has class k mod C", *whole_parts],
            {"classes_per_client": 2},
        ),
        (
            "noniid-#label3", "classes", ["at most three classes", "client k has class k mod C", *whole_parts],
            {"classes_per_client": 3},
        ),
        ("iid-diff-quantity", "quantity", ["at least ten each", "sizes differ", *whole_parts], {"alpha": 0.5}),
    ):  # fmt: skip
        np.random.seed(1)
        random.seed(1)
        beta = options.get("alpha", 0.5)
        parts = utils.partition_data("mnist", "", "", name, 10, beta=beta)[4]
        value = partition_figures(parts.values(), labels, figures)
        C.add(
            "partitions", name, "partition", value, scheme=scheme, labels=known, clients=10, figures=figures, **options
        )
