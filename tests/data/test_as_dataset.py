"""Data sets that a program has already."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from fedcore import ConfigError, DataError, RunConfig
from fedcore.base import registry
from fedcore.client.setup import Setup
from fedcore.data import Dataset, TensorSamples, as_dataset, load_dataset, numbered_as, with_public
from fedcore.data.dataset import data_digest
from tests.sentences import raises

LABELS = np.arange(12) % 3


def images(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 256, (12, *shape)).astype(dtype)


def test_images_are_those_of_the_same_file(tmp_path):
    x = images(6, 6, 3)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=LABELS, x_test=x[:6], y_test=LABELS[:6])
    expected = data_digest(load_dataset(f"npz:{tmp_path / 'a.npz'}"))
    arrays = (x, LABELS, x[:6], LABELS[:6])
    named = dict(zip(("x_train", "y_train", "x_test", "y_test"), map(torch.from_numpy, arrays), strict=True))
    assert data_digest(as_dataset(arrays, "own")) == data_digest(as_dataset(named, "own")) == expected
    assert as_dataset(named, "own").notes == ()
    assert as_dataset({**named, "x_val": x}, "own").notes == ("dataset: keys not used: 'x_val'",)


def test_rows_and_tokens_stay_as_they_are():
    rows = images(5, dtype=np.float64)
    found = as_dataset((rows, LABELS, rows, LABELS), "own")
    assert torch.equal(found.train.gather(torch.tensor([3])), torch.from_numpy(rows[3:4]).float())
    assert (found.input_shape, found.num_classes, found.model) == ((5,), 3, "mlp")
    tokens = images(5, dtype=np.int32)
    assert as_dataset((tokens, LABELS, tokens, LABELS), "own").train.gather(torch.tensor([0])).dtype == torch.int64


def test_series_of_numbers_are_images_only_as_arrays_which_a_note_says():
    series = images(16, 3, dtype=np.float32)
    found = as_dataset((series, LABELS, series, LABELS))
    assert found.input_shape == (1, 16, 3)
    assert "x_train (12, 16, 3) is read as grey images" in found.notes[0]
    square = images(6, 6, dtype=np.float32)
    assert as_dataset((square, LABELS, square, LABELS)).notes == ()
    part = TensorDataset(torch.from_numpy(series), torch.from_numpy(LABELS))
    assert torch.equal(as_dataset((part, part)).train.gather(torch.arange(12)), torch.from_numpy(series))


def test_torch_data_sets_are_read_with_their_own_transforms():
    x = torch.randn(12, 1, 6, 6)
    part = TensorDataset(x, torch.from_numpy(LABELS))
    part.classes = ["a", "b", "c"]
    found = as_dataset((part, part), "own")
    assert torch.equal(found.train.gather(torch.arange(12)), x)
    assert found.class_names == ("a", "b", "c")


def test_random_transforms_are_refused_since_samples_are_read_once():
    class Noisy(TensorDataset):
        def __getitem__(self, position):
            x, y = super().__getitem__(position)
            return x + torch.rand_like(x), y

    part = TensorDataset(torch.randn(12, 1, 6, 6), torch.from_numpy(LABELS))
    for pair in ((Noisy(*part.tensors), part), (part, Noisy(*part.tensors))):
        with raises(DataError):
            as_dataset(pair, "own")


def test_names_of_more_classes_than_are_left_are_not_used():
    part = named("cat", "cow", "dog", "fox")  # one was taken out, and the others may have new numbers
    assert as_dataset((part, part)).class_names is None


class Folders(TensorDataset):
    """Two grey images per class, of the class's own brightness, numbered as torchvision numbers folders."""

    LEVELS = {"cat": 0.0, "dog": 0.25, "horse": 0.5}
    target_transform = None

    def __init__(self, *classes):
        self.classes = list(classes)
        levels = torch.tensor([self.LEVELS[name] for name in classes]).repeat_interleave(2)
        super().__init__(levels.view(-1, 1, 1, 1).expand(-1, 1, 4, 4), torch.arange(2 * len(classes)) // 2)

    def __getitem__(self, position):
        x, y = super().__getitem__(position)
        return x, y if self.target_transform is None else self.target_transform(y)


def test_a_test_folder_without_a_class_is_matched_by_name():
    train, test = Folders("cat", "dog", "horse"), Folders("cat", "horse")
    assert test.tensors[1].tolist() == [0, 0, 1, 1]  # its own numbers
    for pair in ((train, test), (ConcatDataset([train, train]), Subset(test, range(4)))):
        dataset = as_dataset(pair)
        assert dataset.class_names == ("cat", "dog", "horse")
        brightness = dataset.test.gather(torch.arange(4)).mean(dim=(1, 2, 3))
        assert dataset.test.labels.tolist() == (4 * brightness).int().tolist() == [0, 0, 2, 2]


def test_class_names_that_cannot_be_matched_are_refused_with_both_lists():
    train, test = Folders("cat", "horse"), Folders("cat", "dog")
    with raises(DataError, "'dog'", "cat, dog", "cat, horse"):
        as_dataset((train, test))
    with raises(DataError):
        as_dataset((ConcatDataset([train, test]), train))
    test = Folders("horse")
    test.target_transform = lambda label: label + 1
    with raises(DataError):
        as_dataset((train, test))
    test.classes = train.classes  # so says their owner
    assert as_dataset((train, test)).test.labels.tolist() == [1, 1]
    with raises(DataError):
        as_dataset((named("cat", "cow", "dog", "fox"), named("cat", "cow", "dog")))


def test_labels_are_numbered_by_the_names_of_others():
    labels = torch.tensor([1, 0, 1])
    assert numbered_as(labels, ("b", "a"), ("a", "b", "c"), "site").tolist() == [0, 1, 0]
    assert numbered_as(labels, ("a", "a"), ("a", "a"), "site") is labels
    with raises(DataError, "2", "1"):
        numbered_as(labels, ("a",), ("a",), "site")
    with raises(DataError):
        numbered_as(labels, ("a", "a"), ("a", "b"), "site")
    assert numbered_as(torch.tensor([0]), ("a", "x"), ("b", "a"), "site").tolist() == [1]  # no sample is an x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_become_float32(dtype):
    x = torch.randn(12, 5).to(dtype)
    part = TensorDataset(x, torch.from_numpy(LABELS))
    for given in ((part, part), (x, LABELS, x, LABELS)):
        torch.testing.assert_close(as_dataset(given).train.gather(torch.arange(12)), x.float(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 6, 6), (6, 6)])
def test_bytes_of_torch_data_sets_are_pixels(shape):
    x = torch.from_numpy(images(*shape))
    part = TensorDataset(x, torch.from_numpy(LABELS))
    found = as_dataset((part, part)).train
    assert torch.equal(found.gather(torch.arange(12)), x.view(12, 1, 6, 6).float() / 255)
    assert found.from_bytes


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_a_model_for_numbers_does_not_take_whole_ones(dtype):
    rows = images(5, dtype=dtype)
    dataset = as_dataset((rows, LABELS, rows, LABELS))
    with raises(ConfigError, "x.astype", "'float32'"):
        Setup.build(RunConfig(model="mlp"), dataset)


ROWS = images(5, dtype=np.float32)

FRAME, SERIES = pd.DataFrame(ROWS, columns=list("abcde")), pd.Series(LABELS)


def test_labels_with_another_index_go_by_position():
    found = as_dataset((FRAME, SERIES.set_axis(range(50, 62)), FRAME[6:], SERIES[6:]))
    assert found.train.labels.tolist() == LABELS.tolist()
    assert found.test.labels.tolist() == LABELS[6:].tolist()


def pairs(*labels, x=None):
    return [(torch.zeros(2) if x is None else x, label) for label in labels]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(pairs(0, 1))


def named(*names):
    part = TensorDataset(torch.zeros(12, 2), torch.from_numpy(LABELS))
    part.classes = names
    return part


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (7, ("a int",)),
        ({"x_train": ROWS}, ("'y_train'",)),
        ((ROWS, LABELS[:5], ROWS, LABELS), ("y_train", "(5,)", "(12,)")),
        ((ROWS, LABELS + 1, ROWS, LABELS + 1), ("0..C-1", "1..3")),
        ((ROWS, LABELS, ROWS[:0], LABELS[:0]), ("x_test",)),
        ((ROWS, LABELS, None, None), ("x_test",)),
        ((ROWS, LABELS, ROWS, LABELS + 1), ("4 of 12 test samples", 3)),
        ((ROWS, LABELS / 2, ROWS, LABELS), ("y_train", "float64", "(12,)", "--task regression")),
        ((ROWS, LABELS, ROWS[:, :3], LABELS), ("(5,)", "(3,)")),
        ((ROWS, ROWS, LABELS, LABELS), ("x_train, y_train, x_test, y_test", "train_test_split")),
        ((ROWS, LABELS), ("(x_train, y_train, x_test, y_test)",)),
        ((torch.from_numpy(ROWS), torch.from_numpy(LABELS)), ("(x_train, y_train, x_test, y_test)",)),
        ((FRAME, SERIES[::-1], FRAME, SERIES), ("y_train.loc[x.index]",)),
        ((FRAME, SERIES, FRAME[::-1], SERIES), ("y_test.loc[x.index]",)),
        (((ROWS, LABELS), (ROWS, LABELS)), ("pairs", "(x_train, y_train, x_test, y_test)")),
        ((DataLoader(pairs(0, 1)), DataLoader(pairs(0))), ("loader.dataset",)),
        ((Stream(), Stream()), ("list(...)",)),
        ((ROWS * np.nan, LABELS, ROWS, LABELS), ("x_train", 12)),
        ((ROWS, LABELS / 1, ROWS, LABELS), ("y_train", "y.astype(int)")),
        ((ROWS, np.arange(12.0), ROWS, LABELS), ("y.astype(int)", 12)),
        ((ROWS, np.arange(25, 37), ROWS, LABELS), ("searchsorted", 12, "--task regression")),
        ((ROWS, np.arange(25, 37), ROWS, LABELS + 25), ("25..36", 12, "--task regression")),
        ((np.ma.masked_less(ROWS, 50), LABELS, ROWS, LABELS), ("x_train", "masked")),
        ((ROWS, np.ma.masked_equal(LABELS, 1), ROWS, LABELS), ("y_train", "masked")),
        ((ROWS, LABELS, torch.from_numpy(ROWS).to_sparse(), LABELS), ("x_test", ".to_dense()")),
        ((ROWS + 1j, LABELS, ROWS, LABELS), ("x_train", "complex")),
        ((ROWS, LABELS.astype(str), ROWS, LABELS), ("y_train", "<U", "names = numpy.unique")),
        ((ROWS, np.eye(3)[LABELS], ROWS, LABELS), ("y_train", "(12, 3)", "y.argmax")),
        ((ROWS, ROWS > 0, ROWS, ROWS > 0), ("y_train", "bool", "(12, 5)", "--task multilabel")),
        ((ROWS, np.where(LABELS == 0, np.nan, LABELS), ROWS, LABELS), ("y_train", "NaN")),
        ((ROWS, LABELS - 1, ROWS, LABELS - 1), ("-1..1",)),
        ((images(6, 6), LABELS / 1, images(6, 6), LABELS), ("y_train", "y.astype(int)")),
        (([[1, 2], [3]], [0, 1], [[1]], [0]), ("a list", "SequenceSamples")),
        (([torch.ones(2), torch.ones(1)], [0, 1], [[1]], [0]), ("a list", "SequenceSamples")),
        ((pairs("cat"), pairs("cat")), ("<U3",)),
        ((pairs(0.5), pairs(0.5)), ("float64", "(1,)")),
        ((pairs([1, 2], [1]), pairs(0)), ("one whole number",)),
        (([1, 2, 3], [4]), ("pairs",)),
        ((pairs(0, x=torch.zeros(3, 4)), pairs(0)), ("(3, 4)", "(2,)")),
        ((pairs(0, x=torch.zeros(2, dtype=torch.uint8)), pairs(0)), ("uint8", "float32")),
        ((pairs(0, 1, x=Image.new("L", (6, 6))), pairs(0)), ("Image", "transform=ToTensor()")),
        ((pairs(0), pairs(0, 1, x=torch.full([2], torch.nan))), ("sample 0", "2 of 2 samples")),
        ((pairs(True, False), pairs(True)), ("bool", "y.astype(int)")),
        ((named("a", "b"), pairs(0, 1, 2)), ("class_names", 2, 3)),
    ],
)
def test_what_does_not_fit_is_named(given, names):
    with raises(DataError, *names):
        as_dataset(given, "own", "classification")


def table(*columns):
    """Return a table whose column NAME holds the number of its letter, normalised by this number."""
    values = [float(ord(name[0])) for name in columns]
    return TensorSamples(
        torch.tensor([values] * 12), torch.from_numpy(LABELS), mean=values, std=values, columns=columns
    )


def test_the_parts_of_a_data_set_and_public_samples_are_matched_by_the_names_of_columns(monkeypatch):
    found = as_dataset(Dataset("own", table("age", "dose", "sex"), table("sex", "age", "dose"), 3, (3,)))
    assert torch.equal(found.test.inputs, found.train.inputs)
    assert (found.test.columns, found.test.mean, found.test.std) == (("age", "dose", "sex"), *[found.train.mean] * 2)
    monkeypatch.setattr(
        "fedcore.data.assign.load_dataset", lambda *_: replace(found, train=table("dose", "sex", "age"))
    )
    assert torch.equal(with_public(found, "other", 0, None).public.samples.inputs, found.train.inputs)
    with raises(DataError):
        as_dataset(Dataset("own", table("age", "dose"), table("bmi", "age"), 3, (2,)))
    with raises(DataError, "1", "12", "2"):
        TensorSamples(torch.ones(12, 2), torch.from_numpy(LABELS), columns=["age"])


def test_without_the_zoo_arrays_are_answered_with_its_package(monkeypatch):
    installed = registry._scan
    monkeypatch.setattr(registry, "_scan", lambda kind, path: {} if kind == "feature" else installed(kind, path))
    with raises(ConfigError, "fedcore-zoo", "pip install"):
        as_dataset((np.zeros((4, 2)), np.arange(4) % 2, np.zeros((2, 2)), np.arange(2)))
