"""Images in several turns, one domain each."""

import numpy as np
import pytest
import torch

from fedcore import ConfigError, RunConfig
from fedcore.data import load_dataset, make_partition

DIGITS = load_dataset("digits")


@pytest.mark.parametrize(("name", "quarters"), [("digits", (0, 1, 2, 3)), ("digits?turns=2", (0, 2))])
def test_each_image_is_there_in_every_turn(name, quarters):
    dataset = load_dataset(f"rotated:{name}")
    assert dataset.domains.names == tuple(str(90 * quarter) for quarter in quarters)
    for part, plain, domains in (
        (dataset.train, DIGITS.train, dataset.domains.train),
        (dataset.test, DIGITS.test, dataset.domains.test),
    ):
        whole = plain.gather(torch.arange(len(plain))).numpy()
        for number, quarter in enumerate(quarters):
            rows = (domains == number).nonzero().flatten()
            np.testing.assert_array_equal(part.gather(rows), np.rot90(whole, quarter, axes=(2, 3)))
            assert torch.equal(part.labels[rows], plain.labels)
    assert (dataset.num_classes, dataset.input_shape) == (10, (1, 8, 8))


def test_each_client_holds_one_turn():
    dataset = load_dataset("rotated:digits")
    partition = make_partition(dataset, RunConfig(partition="domain", clients=8))
    assert [dataset.domains.train[part].unique().tolist() for part in partition.train] == [[k % 4] for k in range(8)]


def test_bytes_stay_bytes(tmp_path):
    pixels = np.arange(6 * 5 * 7, dtype=np.uint8).reshape(6, 5, 7)
    labels = np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    dataset = load_dataset("rotated:npz:a.npz?turns=2", tmp_path)
    assert dataset.train.from_bytes
    assert torch.equal(dataset.train.images[6:], dataset.train.images[:6].flip(2, 3))
    with pytest.raises(ConfigError, match=r"a\.npz has no images that are as high as wide"):
        load_dataset("rotated:npz:a.npz", tmp_path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("breast-cancer", "breast-cancer has no images"),
        ("digits?turns=3", "turns is '3', expected 2 or 4"),
        ("module:study.images", "turns data sets with a name"),
        ("digts", r"unknown dataset 'digts'\. Did you mean 'digits'"),
    ],
)
def test_what_cannot_be_turned(name, problem):
    with pytest.raises(ConfigError, match=problem):
        load_dataset(f"rotated:{name}")
