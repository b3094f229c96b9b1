"""BlazeFL's own benchmark: all of 100 clients in each round, two shards of CIFAR-10 and five local epochs each."""

from __future__ import annotations

from fedcore_bench.workloads import Workload

BLAZEFL_CIFAR10 = Workload(
    "blazefl-cifar10",
    {"dataset": "cifar10", "model": "simple-cnn", "partition": "shards", "classes_per_client": 2, "clients": 100,
     "participation": 1.0, "local_epochs": 5, "batch_size": 50, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0,
     "eval_every": 1},
)  # fmt: skip
"""simple-cnn is BlazeFL's ``CNN``. BlazeFL's own runs five rounds, and flips and crops images, as no side does here."""
