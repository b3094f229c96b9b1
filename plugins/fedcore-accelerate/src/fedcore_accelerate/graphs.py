"""The runner of CUDA graphs: the steps of one client after the other, replayed from recorded graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedcore import RunConfig
from fedcore.client import Batch, Begin, LocalSession, Memory, Setup, Training, WorkingModel, drain
from fedcore.data import Dataset
from fedcore.engines import ClientTask, Outcome
from fedcore_accelerate.captured_steps import StepGraphs
from fedcore_accelerate.options import options_of
from fedcore_accelerate.recorder import CudaRecorder


def captures(config: RunConfig, device: torch.device, dataset: Dataset) -> bool:
    """Return whether training steps are captured: on CUDA, if all batches of one size have the same shapes.

    With ``--stack`` no step is captured: stacks move the parameters and the momentum, which a graph has by address.
    """
    options = options_of(config)
    if torch.is_anomaly_enabled():
        return False
    return device.type == "cuda" and options.capture and options.stack_size == 1 and dataset.train.fixed_shape


class FixedMemory(Memory):
    """Memory at fixed addresses, which captured steps read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: dict[str, Tensor] = {}
        self._reference: dict[str, Tensor] = {}

    def losses(self) -> dict[str, Tensor]:
        """Return the sums of losses so far, by name. New sums may be added."""
        return self._losses

    def reference(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of parameters at the start of a round, which steps read."""
        for name, value in values.items():
            if name not in self._reference:
                self._reference[name] = torch.empty_like(value)
            self._reference[name].copy_(value)
        return [self._reference[name] for name in values]

    def random_state(self, device: torch.device) -> Tensor | None:
        """Return the state of a device's global generator; None while a step is being captured."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return None if capturing else super().random_state(device)


class Graphs:
    """Takes the steps of one training after the other by graphs."""

    together = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graphs: dict[int, StepGraphs] = {}
        """The captured steps by the id of the working model whose memory they use."""
        self._workings: list[WorkingModel] = []

    @cached_property
    def recorder(self) -> CudaRecorder:
        """Records steps. The main process of a run with workers never uses the device."""
        return CudaRecorder(self._device)

    def working(self, setup: Setup) -> WorkingModel:
        """Return the only working model."""
        self._working = WorkingModel(setup, FixedMemory())
        return self._working

    def run(self, tasks: Sequence[ClientTask], begin: Begin) -> list[Outcome]:
        """Take all steps; see :class:`fedcore.client.runner.Runner`."""
        with self.recorder.running():
            return [self._drain(begin(task, self._working)) for task in tasks]

    def of(self, session: LocalSession) -> StepGraphs:
        """Return the captured steps for a client."""
        working = session.working
        if id(working) not in self.graphs:
            self._workings.append(working)
            self.graphs[id(working)] = StepGraphs(self.recorder)
        return self.graphs[id(working)]

    def _drain(self, training: Training) -> Outcome:
        session: LocalSession | None = None

        def take(batch: Batch) -> None:
            nonlocal session
            graphs = self.of(batch.session)
            if session is None:
                session = batch.session
                graphs.begin_round(session.round, session.lr)
            graphs.take_step(batch)

        try:
            return drain(training, take)
        finally:
            if session is not None:
                self.of(session).forget(session)
