"""Data sets: tiny files in each layout, damaged files, and the real ones where FEDCORE_TEST_DATA has them."""

import fcntl
import hashlib
import os
import pickle
import struct
import threading
import time
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcore import DataError
from fedcore.data import Dataset, default_data_dir, find_data, load_dataset
from fedcore_zoo import datasets, load_torchvision
from tests.sentences import raises

RNG = np.random.default_rng(0)


@pytest.fixture
def offline(monkeypatch):
    """Make every attempt to reach the network fail at once, and count them."""
    attempts = []

    def refuse(request, *args, **kwargs):
        attempts.append(getattr(request, "full_url", request))
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return attempts


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_mnist(root, folder="MNIST", prefixes=("train", "t10k"), labels=range(10), sizes=(20, 10)):
    arrays = {}
    for prefix, n in zip(prefixes, sizes, strict=True):
        arrays[prefix] = RNG.integers(0, 256, (n, 28, 28)), np.resize(list(labels), n)
        write_idx(root / folder / "raw" / f"{prefix}-images-idx3-ubyte", arrays[prefix][0])
        write_idx(root / folder / "raw" / f"{prefix}-labels-idx1-ubyte", arrays[prefix][1])
    return arrays


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std"),
    [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.2860, 0.3530)],
)
def test_idx_files_are_read_without_the_network(tmp_path, offline, name, folder, mean, std):
    arrays = write_mnist(tmp_path, folder)
    dataset = load_dataset(name, tmp_path)
    assert offline == []
    assert (dataset.input_shape, dataset.num_classes, len(dataset.class_names)) == ((1, 28, 28), 10, 10)
    for samples, prefix in ((dataset.train, "train"), (dataset.test, "t10k")):
        images, labels = arrays[prefix]
        assert samples.labels.tolist() == labels.tolist()
        expected = (images[:, None] / 255 - mean) / std
        np.testing.assert_allclose(samples.gather(torch.arange(len(labels))), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "split", "classes", "first", "named"),
    [
        ("emnist", "letters", 26, 1, {0: "a", 25: "z"}),
        ("emnist-balanced", "balanced", 47, 0, {0: "0", 10: "A", 46: "t"}),
    ],
)
def test_emnists_images_are_turned_and_its_classes_counted_from_zero(
    tmp_path, offline, name, split, classes, first, named
):
    train = f"emnist-{split}-train"
    labels = range(first, first + classes)
    arrays = write_mnist(tmp_path, "EMNIST", (train, f"emnist-{split}-test"), labels=labels, sizes=(60, 10))
    dataset = load_dataset(name, tmp_path)
    images, labels = arrays[train]
    assert (dataset.name, dataset.num_classes) == (name, classes)
    assert {number: dataset.class_names[number] for number in named} == named
    assert dataset.train.labels.tolist() == (labels - first).tolist()
    turned = images.transpose(0, 2, 1)[:, None] / 255
    expected = (turned - turned.mean()) / turned.std()
    np.testing.assert_allclose(dataset.train.gather(torch.arange(60)), expected, atol=1e-4)


def test_the_balanced_split_names_its_classes_as_torchvision_does():
    classes = load_torchvision().datasets.EMNIST.classes_split_dict["balanced"]
    assert "".join(classes) == datasets.BALANCED_CLASSES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte"),
        ("emnist", "EMNIST/raw/emnist-letters-train-images-idx3-ubyte"),
        ("emnist-balanced", "EMNIST/raw/emnist-balanced-test-labels-idx1-ubyte"),
        ("cifar10", "cifar10.npz"),
        ("cifar100", "cifar-100-python"),
    ],
)
def test_missing_files_say_what_is_expected_where(tmp_path, offline, name, expected):
    with pytest.raises(DataError, match="--data-dir") as caught:
        load_dataset(name, tmp_path)
    assert str(tmp_path / expected) in str(caught.value)
    assert "no network in tests" in str(caught.value)
    assert 1 <= len(offline) <= 2  # each mirror once, the first missing file only


def test_a_download_of_another_process_is_waited_for(tmp_path, offline):
    """The jobs of an array start together; two downloads at a time damage each other's archive."""
    loaded = []
    with (tmp_path / ".download.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: loaded.append(load_dataset("mnist", tmp_path)))
        thread.start()
        thread.join(0.3)
        write_mnist(tmp_path)
    thread.join(20)
    assert len(loaded[0].train) == 20
    assert offline == []
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]


def test_a_directory_that_cannot_be_written_is_the_same_error(tmp_path, offline):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-dir"):
        load_dataset("mnist", tmp_path / "file")


def test_default_directory(tmp_path, monkeypatch, offline):
    write_mnist(tmp_path)
    monkeypatch.setenv("FEDCORE_DATA", str(tmp_path))
    assert len(load_dataset("mnist").train) == 20
    (tmp_path / "own.npz").touch()
    assert find_data("elsewhere/own.npz", None) == tmp_path / "own.npz"
    monkeypatch.delenv("FEDCORE_DATA")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_data_dir() == Path("/home/somebody/.cache/fedcore/data")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:6],
        lambda content: b"\x00\x00\x08\x02" + content[4:],
        lambda content: b"\x1f\x8b" + content,
        lambda content: content.replace(struct.pack(">I", 28), struct.pack(">I", 14), 1),
    ],
)
def test_damaged_idx_files(tmp_path, offline, damage):
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="t10k-images"):
        load_dataset("mnist", tmp_path)


def test_idx_labels_out_of_range(tmp_path, offline):
    write_mnist(tmp_path, labels=range(11))
    with raises(DataError, "0"):
        load_dataset("mnist", tmp_path)


def cifar_arrays(n_classes=10):
    return {
        "x_train": RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8),
        "y_train": np.arange(10) % n_classes,
        "x_test": RNG.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8),
        "y_test": np.arange(4),
    }


@pytest.mark.parametrize(
    ("name", "classes", "mean", "std"),
    [
        ("cifar10", 10, np.array([125.3, 123.0, 113.9]) / 255, np.array([63.0, 62.1, 66.7]) / 255),
        ("cifar100", 100, (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)),
    ],
)
def test_cifar_from_npz(tmp_path, offline, name, classes, mean, std):
    arrays = cifar_arrays()
    np.savez(tmp_path / f"{name}.npz", **arrays)
    dataset = load_dataset(name, tmp_path)
    assert (dataset.num_classes, dataset.input_shape, dataset.augmentation) == (classes, (3, 32, 32), name)
    expected = (arrays["x_test"] / 255 - mean) / std
    np.testing.assert_allclose(dataset.test.gather(torch.arange(4)), expected.transpose(0, 3, 1, 2), atol=1e-5)


def test_cifar_from_torchvisions_pickles_equals_the_npz(tmp_path, offline, monkeypatch):
    arrays = cifar_arrays()
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest()]

    def batch(x, y):
        return {"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "labels": y.tolist()}

    reader = load_torchvision().datasets.CIFAR10
    train = [write("data_batch_1", batch(arrays["x_train"][:6], arrays["y_train"][:6]))]
    train.append(write("data_batch_2", batch(arrays["x_train"][6:], arrays["y_train"][6:])))
    monkeypatch.setattr(reader, "train_list", train)
    monkeypatch.setattr(reader, "test_list", [write("test_batch", batch(arrays["x_test"], arrays["y_test"]))])
    name, md5 = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(reader, "meta", {"filename": name, "key": "label_names", "md5": md5})
    by_torchvision = load_dataset("cifar10", tmp_path)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    (folder / "test_batch").unlink()  # the archive comes first
    by_npz = load_dataset("cifar10", tmp_path)
    for one, other in ((by_torchvision.train, by_npz.train), (by_torchvision.test, by_npz.test)):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert offline == []


def test_pickles_that_are_not_the_official_ones_are_not_opened(tmp_path, offline):
    reader = load_torchvision().datasets.CIFAR10
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, _ in (*reader.train_list, *reader.test_list):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match="not the official ones"):
        load_dataset("cifar10", tmp_path)
    assert offline == []


@pytest.mark.parametrize(
    "changes",
    [
        {"x_train": RNG.integers(0, 256, (10, 28, 28, 3), dtype=np.uint8)},
        {"x_train": RNG.random((10, 32, 32, 3))},
        {"y_test": np.array([0, 1, 2, 10])},
        {"y_test": np.array([0, 1, 2, -1])},
        {"y_test": np.array([0, 1, 2])},
        {"y_test": np.array([0.0, 1, 2, 3])},
    ],
)
def test_wrong_cifar_archives(tmp_path, offline, changes):
    np.savez(tmp_path / "cifar10.npz", **(cifar_arrays() | changes))
    with raises(DataError, "cifar10.npz"):
        load_dataset("cifar10", tmp_path)


REAL = Path(os.environ.get("FEDCORE_TEST_DATA", "/nonexistent"))


@pytest.mark.parametrize(
    ("name", "needs", "sizes", "test_counts"),
    [
        ("mnist", "MNIST", (60000, 10000), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
        ("fashion-mnist", "FashionMNIST", (60000, 10000), [1000] * 10),
        ("cifar10", "cifar10.npz", (50000, 10000), [1000] * 10),
    ],
)
def test_the_real_files(name, needs, sizes, test_counts):
    if not (REAL / needs).exists():
        pytest.skip("FEDCORE_TEST_DATA does not have it")
    started = time.perf_counter()
    dataset = load_dataset(name, REAL)
    assert isinstance(dataset, Dataset)
    assert (len(dataset.train), len(dataset.test)) == sizes
    assert torch.bincount(dataset.test.labels).tolist() == test_counts
    # The published constants are those of the training images.
    everything = dataset.train.images
    assert everything.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    assert (everything.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-2
    assert time.perf_counter() - started < 60
