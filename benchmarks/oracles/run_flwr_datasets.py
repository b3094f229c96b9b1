"""Flower Datasets' partitioners."""

from __future__ import annotations

import numpy as np
from cases import Fixture, partition_figures
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, PathologicalPartitioner, ShardPartitioner

C = Fixture(
    "flwr_datasets", "Flower Datasets", "flwr-datasets", source="run of the library's partitioners on these labels"
)
C.difference(
    "a sample at a floor",
    "decision",
    "Both give out the same drawn proportions; they are added up in another order, so that a float sum at a whole "
    "number of samples falls to the other side and one sample changes its client.",
    follows="both (rounding)",
    where="flwr_datasets/partitioner/dirichlet_partitioner.py",
)
generator, P = np.random.default_rng(5), "partitions"
for alpha, clients in ((0.5, 10), (5.0, 7), (100.0, 5)):
    labels = generator.integers(0, 6, 997)
    draws = [generator.dirichlet(np.full(clients, alpha)) for _ in range(6)]
    made = DirichletPartitioner(clients, "label", alpha, min_partition_size=0, self_balancing=True, shuffle=False)
    made.dataset = Dataset.from_dict({"label": labels.tolist(), "i": list(range(997))})
    turn = iter(draws)
    made._rng = type("Draws", (), {"dirichlet": lambda _, __, turn=turn: next(turn), "shuffle": lambda *_: None})()
    held = [np.array(made.load_partition(client)["i"]) for client in range(clients)]
    value = [[int((labels[part] == one).sum()) for part in held] for one in range(6)]
    C.add(
        P,
        f"self-balancing Dirichlet from the same draws, alpha {alpha}, {clients} clients",
        "capped_counts",
        value,
        counts=np.bincount(labels, minlength=6),
        draws=draws,
        differs="a sample at a floor" if clients == 10 else "",
    )
labels = np.repeat(np.arange(10), 100)
data = Dataset.from_dict({"label": labels.tolist(), "i": list(range(1000))})
for said, made, scheme, figures, options in (
    (
        "shards: two of 25 each",
        ShardPartitioner(20, "label", num_shards_per_partition=2),
        "shards",
        ["sizes", "at most two classes", "every sample once"],
        {"classes_per_client": 2},
    ),
    (
        "two classes each, the first is client mod C",
        PathologicalPartitioner(20, "label", 2, class_assignment_mode="first-deterministic"),
        "classes",
        ["least classes", "most classes", "client k has class k mod C", "every sample once"],
        {"classes_per_client": 2},
    ),
    ("iid", IidPartitioner(20), "iid", ["sizes", "every sample once"], {}),
):
    made.dataset = data
    parts = [made.load_partition(client)["i"] for client in range(20)]
    C.add(
        P,
        said,
        "partition",
        partition_figures(parts, labels, figures),
        scheme=scheme,
        labels=labels,
        clients=20,
        figures=figures,
        **options,
    )
C.write()
