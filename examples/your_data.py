"""Train a model of your own on data of your own: 13 measurements of wines from three growers.

python examples/your_data.py [ROUNDS]

A run names a function as ``module:MODULE.FUNCTION``. The module must be on PYTHONPATH or, as here, next to the script.
"""

import sys
from math import prod
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_wine
from torch import nn

import fedcore
from fedcore.data import Dataset, TensorSamples
from fedcore_zoo import fixed_split


def wine(data_dir: Path | None = None) -> Dataset:
    """Return the wines: 13 numbers, 3 classes, 133 to train and 45 to test.

    :param data_dir: where the run's ``data_dir`` says that files are; not needed here.
    """
    values, labels = map(torch.from_numpy, load_wine(return_X_y=True))
    train, test = fixed_split(labels, 0.25)
    mean, std = values[train].mean(0), values[train].std(0)
    rows = ((values - mean) / std).float()

    def samples(positions: np.ndarray) -> TensorSamples:
        return TensorSamples(rows[positions], labels[positions], mean=mean, std=std)

    return Dataset(
        name="wine",
        train=samples(train),
        test=samples(test),
        num_classes=3,
        input_shape=(13,),
        class_names=("class_0", "class_1", "class_2"),
    )


def small_network(num_classes: int, input_shape: tuple[int, ...]) -> fedcore.SplitModel:
    """Return an encoder with 16 features; the classifier on top of it is fedcore's.

    Weights are drawn as torch's modules do: fedcore seeds torch before it calls this.
    """
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 16), nn.Tanh())
    return fedcore.SplitModel(encoder, 16, num_classes)


def main(rounds: int = 10) -> fedcore.RunResult:
    result = fedcore.run(
        dataset="module:your_data.wine",
        model="module:your_data.small_network",
        plugins={"fedprox": {"mu": 0.1}},
        clients=4,
        alpha=1.0,
        rounds=rounds,
    )
    print(f"{result.metrics['global']['accuracy']:.1%} of the test wines; everything is in {result.directory}")
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
