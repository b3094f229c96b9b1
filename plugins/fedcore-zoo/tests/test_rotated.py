"""Images in several turns, one domain each."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore import ConfigError, RunConfig
from fedcore.data import load_dataset, make_partition
from tests.sentences import raises

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


def test_masks_turn_with_their_images():
    pytest.importorskip("fedcore_tasks")
    plain, dataset = load_dataset("digit-shapes"), load_dataset("rotated:digit-shapes")
    rows = (dataset.domains.train == 1).nonzero().flatten()
    assert torch.equal(dataset.train.gather(rows), plain.train.gather(torch.arange(len(rows))).rot90(1, (2, 3)))
    assert torch.equal(dataset.train.labels[rows], plain.train.labels.rot90(1, (1, 2)))


def test_a_group_is_one_in_all_turns(monkeypatch):
    groups = torch.arange(len(DIGITS.train)) // 3
    monkeypatch.setattr("fedcore_zoo.rotated.load_dataset", lambda name, data_dir: replace(DIGITS, groups=groups))
    dataset = load_dataset("rotated:digits?turns=2")
    assert torch.equal(dataset.groups, groups.repeat(2))


def test_bytes_stay_bytes(tmp_path):
    pixels = np.arange(6 * 5 * 7, dtype=np.uint8).reshape(6, 5, 7)
    labels = np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    dataset = load_dataset("rotated:npz:a.npz?turns=2", tmp_path)
    assert dataset.train.from_bytes
    assert torch.equal(dataset.train.images[6:], dataset.train.images[:6].flip(2, 3))
    with raises(ConfigError, "a.npz"):
        load_dataset("rotated:npz:a.npz", tmp_path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("breast-cancer", ()),
        ("digits?turns=3", ("'3'", "2", "4")),
        ("module:study.images", ()),
        ("digts", ("'digts'", "'digits'")),
    ],
)
def test_what_cannot_be_turned(name, named):
    with raises(ConfigError, *named):
        load_dataset(f"rotated:{name}")
