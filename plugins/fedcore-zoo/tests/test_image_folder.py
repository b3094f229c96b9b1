"""Images of one's own in folders."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from fedcore import ConfigError, DataError
from fedcore.data import as_dataset, load_dataset
from fedcore_zoo import load_torchvision
from tests.sentences import raises

RNG = np.random.default_rng(0)


def pil_to_tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def write_image(path, size=(8, 6), colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = colour or tuple(RNG.integers(0, 256, 3).tolist())
    Image.new("RGB", size, colour).save(path)
    return colour


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_imagefolder(tmp_path, held_out):
    red = write_image(tmp_path / "train/cat/1.png", colour=(255, 0, 51))
    for name in ("cat/2.png", "dog/1.png"):
        write_image(tmp_path / "train" / name)
    Image.new("L", (8, 6), 102).save(tmp_path / "train/dog/grey.png")
    write_image(tmp_path / held_out / "dog/3.png")  # without cats: still class 1
    dataset = load_dataset(f"imagefolder:{tmp_path}")
    assert (dataset.input_shape, dataset.num_classes) == ((3, 6, 8), 2)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert dataset.test.labels.tolist() == [1]
    first, grey = dataset.train.gather(torch.tensor([0, 3]))
    assert first[:, 2, 2].tolist() == pytest.approx([c / 127.5 - 1 for c in red], abs=1e-6)
    assert grey.unique().tolist() == pytest.approx([102 / 127.5 - 1], abs=1e-6)


def test_imagefolder_in_tiny_imagenets_layout(tmp_path):
    for name in ("n01", "n02"):
        write_image(tmp_path / f"train/{name}/images/{name}_0.JPEG")
    colours = [write_image(tmp_path / f"val/images/val_{i}.JPEG") for i in range(3)]
    write_image(tmp_path / "test/images/test_0.JPEG")  # without labels, not the test set
    rows = "val_0.JPEG\tn02\t0\t0\t9\t9\nval_2.JPEG\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\n"
    (tmp_path / "val/val_annotations.txt").write_text(rows)
    dataset = load_dataset(f"imagefolder:{tmp_path}")
    assert dataset.class_names == ("n01", "n02")
    assert dataset.test.labels.tolist() == [1, 0, 1]
    assert dataset.notes == (f"{tmp_path}: folders not used: 'test/'",)
    third = dataset.test.gather(torch.tensor([2]))[0, :, 0, 0]
    assert third.tolist() == pytest.approx([c / 127.5 - 1 for c in colours[1]], abs=0.06)  # JPEG


def test_wrong_imagefolders(tmp_path):
    def refused(*named):
        with raises(DataError, *named):
            load_dataset(f"imagefolder:{tmp_path}")

    refused(tmp_path / "train")
    (tmp_path / "train").mkdir()
    refused(tmp_path / "train", ".jpg")
    write_image(tmp_path / "train/cat/1.png")
    refused("test/", "val/")
    write_image(tmp_path / "val/cow/1.png")
    refused("'cow'")
    (tmp_path / "val/cow").rename(tmp_path / "val/cat")
    write_image(tmp_path / "train/cat/2.png", size=(8, 7))
    refused("2.png", "8x7", "8x6")
    (tmp_path / "train/cat/2.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cannot read .*2\.png"):  # with what Pillow says
        load_dataset(f"imagefolder:{tmp_path}")
    Image.fromarray(np.full((8, 8), 20_000, np.uint16)).save(tmp_path / "train/cat/2.png")
    refused("2.png", "8 bits")
    write_image(tmp_path / "train/cat/2.png")
    pages = [Image.new("L", (8, 6), grey) for grey in (0, 100, 200)]
    pages[0].save(tmp_path / "train/cat/3.tif", save_all=True, append_images=pages[1:])
    refused("3.tif", "3 pages")
    pages[0].save(tmp_path / "train/cat/3.tif")
    write_image(tmp_path / "val/cat/1.png", size=(9, 9))
    refused("(3, 6, 8)", "(3, 9, 9)")
    for text in ("", "no tabs", "../../etc/passwd\tcat"):
        (tmp_path / "val/val_annotations.txt").write_text(text)
        refused("val_annotations.txt")
    (tmp_path / "val/val_annotations.txt").write_text("gone.png\tcat")
    refused("val_annotations.txt", "gone.png: No such file")


def test_images_are_resized_if_asked(tmp_path):
    write_image(tmp_path / "train/cat/1.png", size=(9, 5))
    write_image(tmp_path / "test/cat/1.png", size=(4, 4))
    assert load_dataset(f"imagefolder:{tmp_path}?size=6").input_shape == (3, 6, 6)
    assert load_dataset(f"imagefolder:elsewhere/{tmp_path.name}?size=6", tmp_path.parent).input_shape == (3, 6, 6), (
        "moved"
    )
    for query, message in (("?size=0", "from 1 to 4096"), ("?classes=cat", "'classes' is unknown; there are: size")):
        with raises(ConfigError, message):
            load_dataset(f"imagefolder:{tmp_path}{query}")


def test_hidden_names_are_left_out_and_files_of_other_suffixes_counted(tmp_path):
    for part in ("train", "test"):
        for name in ("1.png", "2.PNG", "3.gif"):
            write_image(tmp_path / part / "cat" / name)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    for name in ("._1.png", ".hidden/1.png"):
        (tmp_path / "train/cat" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "train/cat" / name).write_bytes(b"no image")
    (tmp_path / "train/cat/notes").write_text("")
    dataset = load_dataset(f"imagefolder:{tmp_path}")
    assert (dataset.class_names, len(dataset.train), len(dataset.test)) == (("cat",), 2, 2)
    train, test = dataset.notes
    assert train.startswith(f"{tmp_path / 'train'}: files left out: 1 without a suffix, 1 .gif; images are .jpg, ")
    assert test.startswith(f"{tmp_path / 'test'}: files left out: 1 .gif; images are .jpg, ")


def test_links_and_pipes_are_no_samples(tmp_path):
    for part in ("train", "test"):
        for name in ("cat/1.png", "dog/1.png", "dog/more/2.png"):
            write_image(tmp_path / part / name)
    plain = load_dataset(f"imagefolder:{tmp_path}")
    train, outside = tmp_path / "train", tmp_path.with_name(f"{tmp_path.name}-outside.png")
    write_image(outside)
    (train / "dog/self").symlink_to(train / "dog")  # twice 2^n copies of each sample
    (train / "dog/more/self").symlink_to(train / "dog")
    (train / "cat/dogs").symlink_to(train / "dog")  # dogs as cats
    (train / "cat/dog.png").symlink_to(train / "dog/1.png")
    (train / "cat/outside.png").symlink_to(outside)
    (train / "cat/gone.png").symlink_to(train / "cat/none.png")
    (train / "cow").symlink_to(train / "dog")  # another class
    os.mkfifo(train / "cat/pipe.png")  # whoever opens it waits for ever
    dataset = load_dataset(f"imagefolder:{tmp_path}")
    for ours, theirs in ((dataset.train, plain.train), (dataset.test, plain.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
    assert dataset.class_names == plain.class_names
    assert dataset.notes[0].startswith(f"{train}: files left out: 7 links, 1 that are not regular; images are .jpg, ")


def test_a_folder_of_links_only_is_refused(tmp_path):
    for part in ("train", "test"):
        write_image(tmp_path / "images" / part / "cat/1.png")
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "train").symlink_to(tmp_path / "images/train")
    with raises(DataError):
        load_dataset(f"imagefolder:{folder}")
    (folder / "train").unlink()
    (folder / "train/cat").mkdir(parents=True)
    (folder / "train/cat/1.png").symlink_to(tmp_path / "images/train/cat/1.png")
    with raises(DataError, "'cat'", "1"):
        load_dataset(f"imagefolder:{folder}")
    write_image(folder / "train/cat/2.png")
    (folder / "test").symlink_to(folder / "train")  # would be the training set again
    with raises(DataError):
        load_dataset(f"imagefolder:{folder}")


def test_annotated_images_are_regular_files_each_once(tmp_path):
    write_image(tmp_path / "train/cat/1.png")
    write_image(tmp_path / "val/images/1.png")
    (tmp_path / "val/images/2.png").symlink_to(tmp_path / "train/cat/1.png")
    os.mkfifo(tmp_path / "val/images/3.png")
    for text, named in (
        ("1.png\tcat\n1.png\tcat", ("1 images", "1.png")),
        ("2.png\tcat", ("2.png",)),
        ("3.png\tcat", ("3.png",)),
    ):
        (tmp_path / "val/val_annotations.txt").write_text(text)
        with raises(DataError, "val_annotations.txt", *named):
            load_dataset(f"imagefolder:{tmp_path}")


def test_a_pair_of_torchvisions_folders_is_matched_by_class_names(tmp_path):
    for part, names in (("train", ("cat", "dog", "horse")), ("test", ("cat", "horse"))):
        for name in names:
            write_image(tmp_path / part / name / "1.png")
    pair = [load_torchvision().datasets.ImageFolder(tmp_path / part, pil_to_tensor) for part in ("train", "test")]
    assert (
        as_dataset(pair).test.labels.tolist() == load_dataset(f"imagefolder:{tmp_path}").test.labels.tolist() == [0, 2]
    )


def test_folders_that_are_not_used_are_named(tmp_path):
    for part in ("train", "test"):
        write_image(tmp_path / "images" / part / "cat/1.png")
    (tmp_path / "images" / ".cache").mkdir()
    assert load_dataset(f"imagefolder:{tmp_path / 'images'}").notes == ()
    write_image(tmp_path / "images/val/cat/1.png")
    assert load_dataset(f"imagefolder:{tmp_path / 'images'}").notes == (
        f"{tmp_path / 'images'}: folders not used: 'val/'",
    )
