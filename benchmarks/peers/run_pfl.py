"""Apple's pfl-research: its distributed simulation, one process per core started by torchrun, all-reduce by gloo.

Favourable: samples are tensors whose batches pfl caches, and it never shuffles them, so it does less than the others;
the evaluation is divided among the processes. Clients come in turn (``minimize_reuse``): its random sampler draws with
replacement, which would train a client of W2 twice. Unfavourable: it evaluates the initial model, which counts as
start-up, and the first cohort's clients before and after training, which counts as warm-up.
"""

from __future__ import annotations

import os

import exported
import numpy as np
import torch
from exported import Job, Stopwatch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F


class Network(nn.Module):
    """What pfl wants of a model."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the training loss of a batch."""
        exported.first_batch()
        self.train()
        return F.cross_entropy(self.layers(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the metrics of a batch."""
        self.eval()
        return {"accuracy": Weighted(int((self.layers(x).argmax(1) == y).sum()), len(y))}


class EveryFewRounds(CentralEvaluationCallback):
    """Evaluates when the others do: pfl's own counts rounds from 0 and leaves the last one out."""

    def __init__(self, watch: Stopwatch, test: PyTorchTensorDataset) -> None:
        super().__init__(test, NNEvalHyperParams(local_batch_size=exported.FORWARD_BATCH))
        self.watch = watch

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Evaluate the initial model."""
        metrics = super().on_train_begin(model=model)
        self.watch.begin()
        return metrics

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Evaluate the global model if that is due."""
        if not self.watch.job.evaluates(central_iteration + 1):
            self.watch.round_ended()
            return False, Metrics()
        # Any number but 0, which it would pass over; its own frequency is 1.
        stop, metrics = super().after_central_iteration(aggregate_metrics, model, central_iteration=1)
        found = dict(iter(metrics))[StringMetricName("Central val | accuracy")]
        self.watch.round_evaluated(found.overall_value)
        # pfl refuses the same names twice in its first round, which has those of the initial model.
        return stop, Metrics()


def main() -> None:
    """Train in one of the processes."""
    job = Job.from_command_line()
    np.random.seed(0)  # pfl's processes draw the same users only from the same seed
    workload, watch = exported.load(job.folder), Stopwatch(job)
    settings = workload.settings
    steps = settings["local_steps"]

    def made(number: int) -> PyTorchTensorDataset:
        held = workload.holds[number]
        if steps:  # pfl ends a client at the end of its samples
            held = held.repeat(-(-steps * settings["batch_size"] // len(held)))[: steps * settings["batch_size"]]
        return PyTorchTensorDataset((workload.images[held], workload.labels[held]), user_id=str(number))

    numbers = range(len(workload.holds))
    # Clients with passes of their samples in a row are too large to be kept.
    client_of = made if steps else [made(number) for number in numbers].__getitem__
    users = FederatedDataset(client_of, get_user_sampler("minimize_reuse", numbers))
    network = Network(workload.model())
    model = PyTorchModel(
        network,
        local_optimizer_create=lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=settings["momentum"]),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=round(settings["participation"] * settings["clients"]),
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=settings["local_epochs"],
            local_learning_rate=settings["lr"],
            local_batch_size=settings["batch_size"],
        ),
        NNEvalHyperParams(local_batch_size=exported.FORWARD_BATCH),
        callbacks=[EveryFewRounds(watch, PyTorchTensorDataset((workload.test_images, workload.test_labels)))],
    )
    if pytorch_ops.distributed.global_rank == 0:
        watch.report()
    # PyTorch's threads abort every third process or so of pfl's at the interpreter's end, with nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
