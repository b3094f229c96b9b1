"""Data sets by name, and the digits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcore.base.errors import DataError, UnknownNameError
from fedcore.data import Dataset, Domains, TensorSamples, load_dataset, loading
from tests.sentences import raises

RNG = np.random.default_rng(0)


def test_digits():
    dataset = load_dataset("digits")
    assert (dataset.name, dataset.num_classes, dataset.input_shape) == ("digits", 10, (1, 8, 8))
    assert (len(dataset.train), len(dataset.test)) == (1437, 360)
    everything = dataset.train.gather(torch.arange(1437))
    assert everything.shape == (1437, 1, 8, 8)
    assert abs(float(everything.mean())) < 1e-5
    assert float(everything.std()) == pytest.approx(1, abs=1e-3)
    mean, std = dataset.train.mean[0], dataset.train.std[0]
    values = (everything * std + mean) * 16
    torch.testing.assert_close(values, values.round(), atol=1e-3, rtol=0)
    assert (values.min().round(), values.max().round()) == (0, 16)
    counts = torch.bincount(dataset.test.labels)
    assert counts.min() >= 34
    assert torch.equal(dataset.train.images, load_dataset("digits").train.images)


def loads(monkeypatch, made):
    """Let every name of a data set stand for a loader that returns ``made``."""
    resolve = loading.resolve
    found = lambda kind, name: (lambda data_dir: made) if kind == "dataset" else resolve(kind, name)  # noqa: E731
    monkeypatch.setattr(loading, "resolve", found)


def test_unknown_and_broken_loaders(monkeypatch):
    with raises(UnknownNameError):
        load_dataset("cifar-10")
    loads(monkeypatch, None)
    with raises(DataError, "'mine'"):
        load_dataset("mine")


def of(labels, **parts):
    samples = TensorSamples(torch.zeros(len(labels), 2), torch.tensor(labels))
    return Dataset("mine", samples, samples, 3, (2,), **parts)


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (of([0, 1, -100, -100, 2]), ("2 of 5 training samples", "0..2", -100)),
        (replace(of([0, 1, 2]), test=of([1, 3]).test), ("1 of 2 test samples", "0..2", 3)),
        (of([0, 1, 2], class_names=("a", "b")), ("class_names", 2, 3)),
        (of([0, 1, 2, 2], sources=torch.zeros(3)), ("sources", 3, 4)),
        (of([0, 1, 2, 2], sources=np.arange(4)), ("sources", "ndarray", "(4,)")),
        (of([0, 1], domains=Domains(("p",), torch.zeros(2), torch.zeros(3))), ("domains.test", 3, 2)),
        (
            of([0, 1], domains=Domains(("p", "q"), torch.tensor([0, 1]), torch.tensor([1, 2]))),
            ("1 of 2 test samples", "0..1", "domains.names"),
        ),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(monkeypatch, dataset, named):
    loads(monkeypatch, dataset)
    with raises(DataError, "'mine'", *named):
        load_dataset("mine")


def test_a_loader_may_return_arrays(monkeypatch):
    rows, labels = np.ones((6, 3), "float32"), np.arange(6) % 3
    loads(monkeypatch, (rows, labels, rows, labels))
    dataset = load_dataset("module:study.rows")
    assert (dataset.name, len(dataset.train), dataset.num_classes, dataset.input_shape) == ("rows", 6, 3, (3,))


def test_the_first_sample_with_nan_is_named(tmp_path):
    images = np.zeros((30, 6, 6))
    images[[11, 17], 2, 2] = np.nan
    labels = np.arange(30) % 3
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=np.zeros((3, 6, 6)), y_test=labels[:3])
    with raises(DataError, "11", "2", "30"):
        load_dataset(f"npz:{tmp_path / 'x.npz'}")
