"""BlazeFL: its loop and FedAvg server, one thread per core that trains clients, each with one thread of PyTorch's.

Favourable: the local loop is the user's and is our gather-and-slice one, no DataLoader; a thread keeps its network
instead of a new one per client; no progress bar; clients of one step are trained in turn, as threads take longer, with
and without a GIL. BlazeFL starts its processes anew in every round, which takes a second and more.
"""

from __future__ import annotations

import threading
from typing import Any

import exported
import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgDownlinkPackage, FedAvgUplinkPackage
from blazefl.core import ThreadPoolClientTrainer, deserialize_model, serialize_model
from exported import Exported, Job, Stopwatch
from torch import nn


class Models:
    """Makes the networks of the server and the threads."""

    def __init__(self, workload: Exported) -> None:
        self.workload = workload

    def select_model(self, model_name: str) -> nn.Module:
        """Return a network with the initial weights."""
        return self.workload.model()


class Threads(ThreadPoolClientTrainer[FedAvgUplinkPackage, FedAvgDownlinkPackage]):
    """Trains clients in a pool of threads."""

    device, device_count = "cpu", 0

    def __init__(self, workload: Exported, cores: int) -> None:
        self.workload, self.num_parallels = workload, cores
        self.cache: list[FedAvgUplinkPackage] = []
        self.stop_event = threading.Event()
        self.of_thread = threading.local()

    def worker(
        self, cid: int, device: str, payload: FedAvgDownlinkPackage, stop_event: threading.Event
    ) -> FedAvgUplinkPackage:
        """Train one client in a thread of the pool."""
        if not hasattr(self.of_thread, "model"):
            torch.set_num_threads(1)
            self.of_thread.model = self.workload.model()
        model = self.of_thread.model
        deserialize_model(model, payload.model_parameters)
        self.workload.train(model, cid)
        return FedAvgUplinkPackage(cid, serialize_model(model), len(self.workload.holds[cid]))

    def uplink_package(self) -> list[FedAvgUplinkPackage]:
        """Hand the updates over."""
        updates, self.cache = self.cache, []
        return updates


class InTurn(Threads):
    """Trains clients one after the other, as BlazeFL's single-threaded trainer."""

    def local_process(self, payload: FedAvgDownlinkPackage, cid_list: list[int]) -> None:
        """Train the cohort."""
        self.cache = [self.worker(cid, self.device, payload, self.stop_event) for cid in cid_list]


def main() -> None:
    """Run the loop of BlazeFL's examples."""
    job = Job.from_command_line()
    workload, watch = exported.load(job.folder), Stopwatch(job)
    settings = workload.settings
    dataset: Any = None  # of the server's own evaluation, which is not used
    handler = FedAvgBaseServerHandler(
        model_selector=Models(workload),
        model_name="",
        dataset=dataset,
        global_round=job.rounds,
        num_clients=settings["clients"],
        sample_ratio=settings["participation"],
        device="cpu",
        batch_size=settings["batch_size"],
        seed=settings["seed"],
    )
    longest = max(map(len, workload.holds))
    one_step = longest <= settings["batch_size"] and settings["local_epochs"] == 1 and not settings["local_steps"]
    trainer = (InTurn if one_step else Threads)(workload, job.cores)
    watch.begin()
    while not handler.is_stopped():
        cohort = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), cohort)
        for update in trainer.uplink_package():
            handler.load(update)
        torch.set_num_threads(job.cores)  # for the evaluation: the trainer's threads lowered it
        watch.round_trained(handler.model)
    watch.report()


if __name__ == "__main__":
    main()
