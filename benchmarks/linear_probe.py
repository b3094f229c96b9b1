"""What of a finished run's error is its classifier's: test accuracy with other classifiers on the same encoder.

    python benchmarks/linear_probe.py RUN_DIRECTORY...

One line per run: train and test accuracy of the global model; test accuracy with one offset per class added to its
logits; test accuracy of a new linear classifier. Offsets and classifier are fitted on the training samples of all
clients together, without augmentation, which no client could do: both are bounds for what a correction of the
classifier can gain, not a method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import fedcore
from fedcore.client.working_model import all_outputs
from fedcore.data.client_data import ClientData
from fedcore_testing.federation import data_of

CPU = torch.device("cpu")

DECAY = 1e-4
"""Weight of the squared norm of the new classifier's weights."""


def minimise(parameters: Sequence[Tensor], loss: Callable[[], Tensor]) -> None:
    """Minimise ``loss()`` over ``parameters`` by L-BFGS."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def class_offsets(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the offsets (C,) with the least cross-entropy."""
    offsets = torch.zeros(logits.shape[1], requires_grad=True)
    minimise([offsets], lambda: F.cross_entropy(logits + offsets, labels))
    return offsets.detach()


def linear_classifier(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return weight (C, d) and bias (C,) of softmax regression on standardised features."""
    weight = torch.zeros(classes, features.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    minimise(
        [weight, bias],
        lambda: F.cross_entropy(features @ weight.T + bias, labels) + DECAY * weight.square().sum(),
    )
    return weight.detach(), bias.detach()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * (logits.argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Other classifiers on the encoders of finished runs")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| run | train % | test % | test %, offsets | test %, new classifier |\n| --- | ---: | ---: | ---: | ---: |")
    for directory in args.runs:
        model, (data, partition) = fedcore.load_run(directory).model, data_of(directory)
        trained_on = torch.cat(list(partition.train)).unique()
        train = ClientData(data.train, trained_on, CPU)
        test = ClientData(data.test, torch.arange(len(data.test)), CPU)
        features, logits = all_outputs(model, train)
        test_features, test_logits = all_outputs(model, test)
        offset = test_logits + class_offsets(logits, train.labels)
        mean, deviation = features.mean(0), features.std(0) + 1e-3
        weight, bias = linear_classifier((features - mean) / deviation, train.labels, data.num_classes)
        probe = (test_features - mean) / deviation @ weight.T + bias
        shares = accuracy(logits, train.labels), *(accuracy(x, test.labels) for x in (test_logits, offset, probe))
        print(f"| {directory.name} | {' | '.join(f'{share:.2f}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
