"""Domain folders in their published layouts, Digits-Five's files, and partitions by domain."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import loadmat, savemat

from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import load_dataset, make_partition
from fedcore_zoo.domains import FEDBN_CLASSES, read_domains
from tests.sentences import raises


def write(path, level, size=(9, 7)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, level, level)).save(path)


@pytest.fixture
def pacs(tmp_path):
    """Three domains with two classes of five images each, of different sizes."""
    for d, domain in enumerate(("art_painting", "photo", "sketch")):
        for c, label in enumerate(("dog", "horse")):
            for k in range(5):
                write(tmp_path / domain / label / f"pic_{k}.png", 100 * d + 10 * c + k, size=(9 + k, 7))
    return tmp_path


def test_folders_of_domains_and_classes(pacs):
    dataset = load_dataset(f"domains:{pacs}?size=8")
    assert dataset.domains.names == ("art_painting", "photo", "sketch")
    assert dataset.class_names == ("dog", "horse")
    assert dataset.input_shape == (3, 8, 8)
    assert (len(dataset.train), len(dataset.test)) == (24, 6)  # of five images one is for the test
    for samples, domains in ((dataset.train, dataset.domains.train), (dataset.test, dataset.domains.test)):
        pixels = ((samples.gather(torch.arange(len(samples)))[:, 0, 0, 0] + 1) * 127.5).round()
        assert torch.equal((pixels // 100).long(), domains)
        assert torch.equal((pixels % 100 // 10).long(), samples.labels)
    assert torch.equal(dataset.sources, dataset.domains.train)
    assert torch.equal(read_domains(pacs, size=8).test.labels, dataset.test.labels)  # the same draw each time


def test_files_of_other_suffixes_are_counted(pacs):
    write(pacs / "photo/dog/pic_5.gif", 5)
    dataset = load_dataset(f"domains:{pacs}?size=4")
    assert len(dataset.train) + len(dataset.test) == 30
    assert dataset.notes[0].startswith(f"{pacs / 'photo'}: files left out: 1 .gif; images are .jpg, ")


def test_lists_of_domainnet(pacs):
    for domain in ("art_painting", "photo", "sketch"):
        for part, numbers in (("train", (0, 1)), ("test", (4,))):
            lines = [f"{domain}/{label}/pic_{k}.png {c}" for c, label in enumerate(("dog", "horse")) for k in numbers]
            (pacs / f"{domain}_{part}.txt").write_text("\n".join(lines) + "\n")
    dataset = load_dataset(f"domains:{pacs}?size=8")
    assert (len(dataset.train), len(dataset.test)) == (12, 6)
    pixels = ((dataset.test.gather(torch.arange(6))[:, 0, 0, 0] + 1) * 127.5).round()
    assert (pixels % 10).tolist() == [4] * 6
    (pacs / "photo_test.txt").write_text("photo/../../etc/passwd 0\n")
    with raises(DataError, "photo/CLASS/FILE"):
        load_dataset(f"domains:{pacs}")


def test_what_lists_of_domainnet_may_not_name(pacs):
    def write_lists(train, test):
        for domain in ("art_painting", "photo", "sketch"):
            for part, files in (("train", train), ("test", test)):
                (pacs / f"{domain}_{part}.txt").write_text("".join(f"{domain}/{file} 0\n" for file in files))

    def refused(*named):
        with raises(DataError, *named):
            load_dataset(f"domains:{pacs}?size=4")

    both = [f"{label}/pic_{k}.png" for label in ("dog", "horse") for k in range(5)]
    write_lists(both, both)
    refused("art_painting_train.txt", "art_painting_test.txt", "10 images", "dog/pic_0.png")
    write_lists([*both, "dog/pic_0.png"], [])
    refused("1 images", "dog/pic_0.png")
    write_lists(both[:8], [*both[8:], "dog/gone.png"])
    refused("art_painting/dog/gone.png: No such file")
    (pacs / "art_painting/dog/gone.png").symlink_to(pacs / "photo/dog/pic_0.png")
    refused("art_painting/dog/gone.png", "link")
    (pacs / "art_painting/dog/gone.png").unlink()
    (pacs / "art_painting/cow").symlink_to(pacs / "photo/dog")
    write_lists(both[:8], [*both[8:], "cow/pic_0.png"])
    refused("art_painting/cow", "link")
    write_lists(both[:8], [*both[8:], "../secret.png"])
    refused("art_painting/..", "link")


def test_links_are_no_samples(pacs):
    plain = load_dataset(f"domains:{pacs}?size=4")
    (pacs / "sketch/dog/self").symlink_to(pacs / "sketch/dog")
    (pacs / "sketch/dog/horses").symlink_to(pacs / "sketch/horse")
    (pacs / "pictures").symlink_to(pacs / "photo")  # the same domain under another name
    os.mkfifo(pacs / "sketch/dog/pipe.png")
    dataset = load_dataset(f"domains:{pacs}?size=4")
    for ours, theirs in ((dataset.train, plain.train), (dataset.test, plain.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert dataset.class_names == plain.class_names
    first, second = dataset.notes
    assert first == f"{pacs}: links to folders left out: pictures"
    assert second.startswith(f"{pacs / 'sketch'}: files left out: 2 links, 1 that are not regular; images are .jpg, ")


def test_some_classes_and_a_domain_that_lacks_one(pacs):
    dataset = load_dataset(f"domains:{pacs}?size=4&classes=horse")
    assert dataset.class_names == ("horse",)
    assert len(dataset.train) == 12
    for k in range(5):
        (pacs / f"sketch/dog/pic_{k}.png").unlink()
    (pacs / "sketch/dog").rmdir()
    found = load_dataset(f"domains:{pacs}?size=4")
    assert found.notes == ("domains without some classes: sketch lacks dog",)
    assert found.num_classes == 2
    for k in range(1, 5):
        (pacs / f"sketch/horse/pic_{k}.png").unlink()
    assert load_dataset(f"domains:{pacs}?size=4").notes[1:] == (
        "domains without test images, which have no accuracy: sketch",
    )
    for name in FEDBN_CLASSES:
        write(pacs / "photo" / name / "1.png", 5)
    assert load_dataset(f"domains:{pacs}?classes=fedbn").class_names == FEDBN_CLASSES


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("?sise=8", ("'sise'",)),
        ("?size=0", ("1", "4096")),
        ("?classes=cat", ("'cat'",)),
        ("?classes=dog,horse,dog", ("classes=dog",)),
    ],
)
def test_wrong_options(pacs, query, named):
    with raises((ConfigError, DataError), *named):
        load_dataset(f"domains:{pacs}{query}")


def test_wrong_folders(tmp_path, pacs):
    with raises(DataError):
        load_dataset(f"domains:{tmp_path / 'absent'}")
    with raises(DataError):
        load_dataset(f"domains:{pacs / 'photo'}")
    (pacs / "photo/dog/pic_0.png").write_bytes(b"no image")
    with raises(DataError):
        load_dataset(f"domains:{pacs}")


def one_hot(labels):
    return np.eye(10, dtype=np.uint8)[labels]


@pytest.fixture
def digit_five(tmp_path):
    """The published files' form, with 20 training and 10 test images each; a pixel is ten times the label."""
    root, rng = tmp_path / "Digit-Five", np.random.default_rng(0)
    root.mkdir()
    labels = {part: np.concatenate([np.arange(10), rng.integers(0, 10, n)]) for part, n in (("train", 10), ("test", 0))}

    def images(part, *shape):
        return np.broadcast_to(10 * labels[part].reshape(-1, *(1 for _ in shape)), (len(labels[part]), *shape))

    mnist = {f"{part}_32": images(part, 32, 32).astype(np.uint8) for part in labels}
    savemat(root / "mnist_data.mat", {**mnist, **{f"label_{part}": one_hot(labels[part]) for part in labels}})
    mnistm = {part: images(part, 28, 28, 3).astype(np.uint8) for part in labels}
    savemat(root / "mnistm_with_label.mat", {**mnistm, **{f"label_{part}": one_hot(labels[part]) for part in labels}})
    for part in labels:
        y = np.where(labels[part] == 0, 10, labels[part]).astype(np.uint8)[:, None]
        x = images(part, 32, 32, 3).astype(np.uint8).transpose(1, 2, 3, 0)
        savemat(root / f"svhn_{part}_32x32.mat", {"X": x, "y": y})
    syn = {f"{part}_data": images(part, 32, 32, 3).astype(np.uint8) for part in labels}
    savemat(root / "syn_number.mat", {**syn, **{f"{part}_label": labels[part][:, None] for part in labels}})
    cells = np.empty((2, 2), dtype=object)
    for row, part in enumerate(labels):
        cells[row, 0] = images(part, 1, 28, 28) / 255 + 1e-6
        cells[row, 1] = labels[part][:, None].astype(np.uint8)
    savemat(root / "usps_28x28.mat", {"dataset": cells})
    return tmp_path, labels


def test_digits_five(digit_five):
    root, labels = digit_five
    dataset = load_dataset("digits-five", root)
    assert dataset.domains.names == ("mnist", "mnistm", "svhn", "syn", "usps")
    assert dataset.input_shape == (3, 32, 32)
    for part, samples, domains in (
        ("train", dataset.train, dataset.domains.train),
        ("test", dataset.test, dataset.domains.test),
    ):
        assert samples.labels.tolist() == 5 * labels[part].tolist()
        assert domains.tolist() == [d for d in range(5) for _ in labels[part]]
        pixels = (samples.gather(torch.arange(len(samples))).mean(dim=(1, 2, 3)) + 1) * 127.5
        assert torch.allclose(pixels, 10.0 * samples.labels, atol=1)


def test_damaged_files_of_digits_five(digit_five):
    root, _ = digit_five
    (root / "Digit-Five/syn_number.mat").write_bytes(b"nothing")
    with raises(DataError, "syn_number"):
        load_dataset("digits-five", root)
    savemat(root / "Digit-Five/syn_number.mat", {"other": 1})
    with raises(DataError):
        load_dataset("digits-five", root)
    (root / "Digit-Five/syn_number.mat").unlink()
    with raises(DataError):
        load_dataset("digits-five", root)


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        ("syn_number.mat", "train_label", float("nan"), ("1",)),
        ("syn_number.mat", "test_label", 99, ("1", "99")),
        ("syn_number.mat", "test_label", -3, ("1", "-3")),
        ("syn_number.mat", "test_label", 2.5, ("1", "2.5")),
        ("svhn_test_32x32.mat", "y", 11, ("1", "11")),
        ("mnist_data.mat", "label_train", 1, ()),
        ("mnistm_with_label.mat", "label_test", float("nan"), ()),
        ("syn_number.mat", "train_data", 1e9, ("1000000000.0", "255")),
        ("svhn_train_32x32.mat", "X", -1, ("-1",)),
        ("mnist_data.mat", "test_32", float("nan"), ()),
    ],
)
def test_values_that_no_digit_has_are_refused(digit_five, file, key, value, named):
    root, _ = digit_five
    content = {name: array for name, array in loadmat(root / "Digit-Five" / file).items() if name[0] != "_"}
    content[key] = content[key].astype(np.float64)
    content[key].flat[:2] = (value, content[key].flat[1])
    if file == "mnist_data.mat" and key == "label_train":
        content[key].flat[:2] = (1, 1)  # two digits at once
    savemat(root / "Digit-Five" / file, content)
    with raises(DataError, *named):
        load_dataset("digits-five", root)


def test_files_with_more_labels_than_images_are_refused(digit_five):
    root, _ = digit_five
    content = {name: array for name, array in loadmat(root / "Digit-Five/syn_number.mat").items() if name[0] != "_"}
    savemat(root / "Digit-Five/syn_number.mat", {**content, "train_label": content["train_label"][1:]})
    with raises(DataError, "20", "19"):
        load_dataset("digits-five", root)


@pytest.mark.parametrize("partitioner", ["domain", "domain-dirichlet"])
def test_each_client_holds_one_domain(pacs, partitioner):
    dataset = read_domains(pacs, size=4)
    found = make_partition(dataset, RunConfig(partition=partitioner, clients=5, seed=3))
    held = [dataset.domains.train[part].unique().tolist() for part in found.train]
    assert held == [[0], [1], [2], [0], [1]]
    first, second, third = dataset.domains.names
    assert found.names == [f"{first} 1", f"{second} 1", third, f"{first} 2", f"{second} 2"]
    assert sorted(found.train.positions.tolist()) == list(range(len(dataset.train)))
    again, other = (make_partition(dataset, RunConfig(partition=partitioner, clients=5, seed=seed)) for seed in (3, 4))
    assert found.sha256 == again.sha256 != other.sha256


def test_without_one_domain_the_others_split_as_before(pacs):
    dataset = read_domains(pacs, size=4)
    everything = make_partition(dataset, RunConfig(partition="domain", clients=3, seed=3))
    without = make_partition(dataset, RunConfig(partition="domain", clients=2, unseen_domain="art_painting", seed=3))
    assert [part.tolist() for part in without.train] == [part.tolist() for part in list(everything.train)[1:]]


def test_partitions_need_domains_and_as_many_clients(pacs):
    with raises(ConfigError):
        make_partition(load_dataset("digits"), RunConfig(partition="domain", clients=3))
    with raises(ConfigError, "3"):
        make_partition(read_domains(pacs, size=4), RunConfig(partition="domain", clients=2))
