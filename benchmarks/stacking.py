"""What training several clients as one would gain: torch.func's stacked step beside their steps one by one.

A stacked step holds K clients' weights in tensors with one more dimension and sends K batches through the network at
once (``torch.func.vmap`` over ``functional_call``). Both sides take the same SGD steps, and nothing but them: no hooks,
no states, no checks. So this is the most that an engine could gain by it; what a client costs beyond its steps stays.

    python benchmarks/stacking.py
    python benchmarks/stacking.py --device cuda --clients 8 --clients 64

On CUDA both sides are captured as graphs, as the engine captures its steps. The two take turns, block by block.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedcore import RunConfig
from fedcore.client.optimizer import Optimizer, ParameterGroup
from fedcore.models import build_model

WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """A network and the batches it is trained on."""

    name: str
    model: str
    shape: tuple[int, ...]
    batch: int


CASES = (
    Case("digits", "mlp", (1, 8, 8), 16),
    Case("digits, convolutions", "simple-cnn", (1, 8, 8), 16),
    Case("MNIST, no convolutions", "mlp", (1, 28, 28), 32),
    Case("W1", "fdcl-cnn", (1, 28, 28), 32),
    Case("W2, without head", "simple-cnn", (3, 32, 32), 64),
    Case("pfl-cifar10", "module:fedcore_bench.workloads.pfl_cnn", (3, 32, 32), 10),
)
CLASSES = 10


class Clients:
    """K clients' models, batches and momentum; each side has its own."""

    def __init__(self, case: Case, count: int, device: torch.device) -> None:
        model, _ = build_model(case.model, num_classes=CLASSES, input_shape=case.shape, seed=0, projection=False)
        stream = torch.Generator().manual_seed(1)
        self.count = count
        self.x = torch.randn(count, case.batch, *case.shape, generator=stream).to(device)
        self.y = torch.randint(CLASSES, (count, case.batch), generator=stream).to(device)
        self.models = [copy.deepcopy(model).to(device).train() for _ in range(count)]


class OneByOne(Clients):
    """A step of each client after the other's."""

    def __init__(self, case: Case, count: int, device: torch.device) -> None:
        super().__init__(case, count, device)
        self.optimizers = [optimizer(list(model.parameters())) for model in self.models]

    def step(self) -> None:
        """Take one step of every client."""
        for client, model in enumerate(self.models):
            descend(self.optimizers[client], F.cross_entropy(model(self.x[client]).logits, self.y[client]))


class Stacked(Clients):
    """One step of all clients at once."""

    def __init__(self, case: Case, count: int, device: torch.device) -> None:
        super().__init__(case, count, device)
        columns = zip(*(model.parameters() for model in self.models), strict=True)
        stacks = [nn.Parameter(torch.stack([w.detach() for w in column])) for column in columns]
        self.weights = dict(zip(dict(self.models[0].named_parameters()), stacks, strict=True))
        self.optimizer = optimizer(stacks)
        model: nn.Module = self.models[0]

        def logits(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, weights, (x,)).logits

        self.logits = vmap(logits, randomness="different")

    def step(self) -> None:
        """Take one step of every client."""
        logits = self.logits(self.weights, self.x)  # (K, B, C)
        losses = F.cross_entropy(logits.flatten(0, 1), self.y.flatten(), reduction="none").view(self.count, -1)
        descend(self.optimizer, losses.mean(1).sum())  # no client's loss reaches another's weights


def optimizer(weights: list[nn.Parameter]) -> Optimizer:
    """Return the engine's own optimizer."""
    made = Optimizer(RunConfig(momentum=0.9), [ParameterGroup(weights, lr=0.01, weight_decay=1e-5)])
    made.begin(weights)
    return made


def descend(optimizer: Optimizer, loss: Tensor) -> None:
    """Take a step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def repeated(step: Callable[[], None], device: torch.device) -> Callable[[int], float]:
    """Return what takes a number of steps and says the seconds; on CUDA as a captured graph."""
    if device.type != "cuda":
        for _ in range(WARM_UP):
            step()
        return lambda count: timed(step, count)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replayed(count: int) -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return replayed


def timed(step: Callable[[], None], count: int) -> float:
    """Return the processor's seconds of a number of steps: beside other work they waver less than the clock's."""
    began = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - began


def compare(case: Case, count: int, device: torch.device, blocks: int, steps: int) -> str:
    """Time the two sides in turn; returns a row of the table."""
    sides = [repeated(side(case, count, device).step, device) for side in (OneByOne, Stacked)]
    seconds: list[list[float]] = [[], []]
    for block in range(blocks):
        for side in (0, 1) if block % 2 == 0 else (1, 0):  # each is first in every other block
            seconds[side].append(sides[side](steps) / steps / count)
    ratios = [one / stacked for one, stacked in zip(*seconds, strict=True)]
    alone, stacked = (1e6 * statistics.median(side) for side in seconds)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {case.name} | {case.model.rpartition('.')[2]} | {count} | {alone:.0f} | {stacked:.0f} | {spread} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (one thread, as a worker has) or cuda")
    parser.add_argument("--clients", type=int, action="append", help="clients per stack; may be given several times")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps of every client per block")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_num_threads(1)
    print("| steps of | network | clients | one by one, us each | stacked, us each | gain |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for count in options.clients or (4, 16, 64):
            print(compare(case, count, device, options.blocks, options.steps), flush=True)


if __name__ == "__main__":
    main()
