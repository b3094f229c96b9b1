"""The cross-device workload: 3,400 clients of unequal sizes, 50 a round, 20 steps of 20 samples each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedcore import numpy_generator
from fedcore.data import IndexLists, IntArray
from fedcore_bench.workloads import Workload

BATCH = 20
MEAN_BATCHES = 10


class UnequalDeals:
    """A partitioner: sizes are a Dirichlet(1) draw in whole batches; samples are dealt again from the start."""

    shares_samples = True

    def __call__(self, labels: IntArray, num_clients: int, *, seed: int, **_: Any) -> IndexLists:
        """Return each client's positions."""
        stream = numpy_generator(seed, "partition")
        shares = stream.dirichlet(np.ones(num_clients))
        sizes = BATCH * np.maximum(1, np.rint(shares * num_clients * MEAN_BATCHES)).astype(np.int64)
        ends = np.cumsum(sizes)
        order = torch.from_numpy(stream.permutation(len(labels)).astype(np.int32))
        dealt = order.repeat(-(-int(ends[-1]) // len(order)))[: int(ends[-1])]
        return IndexLists(dealt.contiguous(), torch.from_numpy(np.concatenate([[0], ends])))


unequal = UnequalDeals()

CROSS_DEVICE = Workload(
    "cross-device",
    {"dataset": "fashion-mnist", "model": "module:fedcore_bench.workloads.pfl_cnn",
     "partition": f"module:{__name__}.unequal",
     "clients": 3400, "participation": 50 / 3400, "local_epochs": 1, "local_steps": 20, "batch_size": BATCH, "lr": 0.05,
     "momentum": 0.0, "weight_decay": 0.0, "eval_every": 1000},
)  # fmt: skip
"""The network of 1.2 million parameters with which FEMNIST is trained: two 3x3 convolutions, a hidden layer of 128."""
