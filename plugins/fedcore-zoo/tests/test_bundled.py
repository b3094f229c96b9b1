"""What scikit-learn bundles, and the fixed split."""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer, load_digits

from fedcore.data import Split, assemble, load_dataset
from fedcore_testing import check_dataset, same_tensors
from fedcore_zoo import breast_cancer, fixed_split


def test_the_digits_of_the_core_are_scikit_learns_in_the_fixed_split():
    bunch = load_digits()
    images = torch.from_numpy(bunch.images / 16.0).to(torch.float32).unsqueeze(1)
    labels = torch.from_numpy(bunch.target)
    train, test = (Split(images[part], labels[part]) for part in fixed_split(bunch.target, 0.2))
    expected, found = assemble("digits", train, test), load_dataset("digits")
    assert same_tensors(found.train.tensors(), expected.train.tensors())
    assert same_tensors(found.test.tensors(), expected.test.tensors())


def test_breast_cancer():
    check_dataset(breast_cancer)
    dataset = load_dataset("breast-cancer")
    assert (len(dataset.train), len(dataset.test), dataset.input_shape) == (455, 114, (30,))
    rows = dataset.train.gather(torch.arange(455))
    torch.testing.assert_close(rows.mean(dim=0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(dim=0, correction=0), torch.ones(30), atol=1e-5, rtol=0)
    raw, (train, _) = load_breast_cancer(), fixed_split(load_breast_cancer().target, 0.2)
    mean, std = (torch.tensor(numbers, dtype=torch.float64) for numbers in (dataset.train.mean, dataset.train.std))
    torch.testing.assert_close(((torch.from_numpy(raw.data[train]) - mean) / std).float(), rows)
    assert dataset.train.columns == dataset.test.columns == tuple(raw.feature_names)
    # 357 of 569 are benign, in both parts alike.
    assert torch.bincount(dataset.train.labels).tolist() == [170, 285]
    assert torch.bincount(dataset.test.labels).tolist() == [42, 72]
