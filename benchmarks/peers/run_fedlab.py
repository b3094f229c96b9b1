"""FedLab's standalone pipeline: a serial trainer, clients one after the other, all threads on one client.

Favourable: get_dataloader is the user's in FedLab, and returns our gather-and-slice batches, not a DataLoader as in its
examples. FedLab's trainer makes one SGD without momentum for all clients; ours makes one with momentum for each.
"""

from __future__ import annotations

from typing import Any

import exported
import torch
import torchvision_stub  # noqa: F401 - before FedLab
from exported import Exported, Job, Stopwatch
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor


class Epochs:
    """What the trainer iterates over once per local epoch."""

    def __init__(self, workload: Exported, number: int, size: int) -> None:
        self.data, self.size = workload.client(number), size

    def __iter__(self) -> Any:
        return self.data.batches(self.size)


class Clients(FedDataset):
    """The clients' samples."""

    def __init__(self, workload: Exported) -> None:
        super().__init__()
        self.workload, self.num = workload, len(workload.holds)

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Epochs:
        """Return a client's batches."""
        return Epochs(self.workload, id, batch_size)


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's trainer with momentum."""

    def train(self, model_parameters: Tensor, train_loader: Epochs) -> list[Tensor]:
        """Train one client with an optimizer of its own."""
        self.optimizer = self.dataset.workload.optimizer(self._model)
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """Standalone simulation that is timed."""

    watch: Stopwatch

    def evaluate(self) -> None:
        """Evaluate the global model if that is due; FedLab calls this after every round."""
        self.watch.round_trained(self.handler.model)


def main() -> None:
    """Run the pipeline."""
    job = Job.from_command_line()
    torch.set_num_threads(job.cores)
    workload = exported.load(job.folder)
    settings, model = workload.settings, workload.model()
    trainer = Trainer(model, settings["clients"])
    trainer.setup_dataset(Clients(workload))
    trainer.setup_optim(settings["local_epochs"], settings["batch_size"], settings["lr"])
    handler = FedAvgServerHandler(model, job.rounds, settings["participation"])
    pipeline = Pipeline(handler, trainer)
    pipeline.watch = Stopwatch(job)
    pipeline.watch.begin()
    pipeline.main()
    pipeline.watch.report()


if __name__ == "__main__":
    main()
