"""Data of one's own: npz files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedcore import ConfigError, DataError
from fedcore.data import load_dataset
from fedcore_zoo import read_npz
from tests.sentences import raises

RNG = np.random.default_rng(0)


def write_npz(path, **changes):
    arrays = {
        "x_train": RNG.integers(0, 256, (30, 6, 5, 3), dtype=np.uint8),
        "y_train": np.arange(30) % 3,
        "x_test": RNG.integers(0, 256, (9, 6, 5, 3), dtype=np.uint8),
        "y_test": np.arange(9) % 3,
    } | changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return arrays


def test_npz_layouts_agree(tmp_path):
    arrays = write_npz(tmp_path / "nhwc.npz")
    planes = {key: arrays[key].transpose(0, 3, 1, 2) for key in ("x_train", "x_test")}
    write_npz(tmp_path / "nchw.npz", **planes)
    floats = {key: (arrays[key] / 255).astype(np.float32) for key in ("x_train", "x_test")}
    write_npz(tmp_path / "float.npz", **floats)
    one, two, three = (load_dataset(f"npz:{tmp_path / f}.npz") for f in ("nhwc", "nchw", "float"))
    unit = planes["x_train"] / 255
    expected = (unit - unit.mean((0, 2, 3), keepdims=True)) / unit.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(one.train.gather(torch.arange(30)), expected, atol=1e-5)
    assert torch.equal(one.test.images, two.test.images)
    torch.testing.assert_close(one.test.images, three.test.images, atol=1e-5, rtol=0)
    assert (one.name, one.num_classes, one.input_shape) == ("npz:nhwc.npz", 3, (3, 6, 5))


def test_npz_of_grey_images_constant_pixels_and_column_labels(tmp_path):
    flat = np.full((30, 6, 5), 7, dtype=np.uint8)
    write_npz(tmp_path / "a.npz", x_train=flat, x_test=flat[:9], y_train=(np.arange(30) % 3)[:, None])
    dataset = load_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert dataset.input_shape == (1, 6, 5)
    assert float(dataset.train.images.abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"y_test": None}, ("y_test",)),
        ({"x_train": np.array([{}] * 30)}, ()),
        ({"x_train": np.zeros((30, 6, 5, 3), np.int64)}, ()),
        ({"x_train": np.full((30, 6, 5, 3), np.nan), "x_test": np.zeros((9, 6, 5, 3))}, ()),
        ({"x_train": np.full((30, 6, 5, 3), 1e300), "x_test": np.zeros((9, 6, 5, 3))}, ()),
        ({"x_train": np.zeros((30, 6, 5, 3))}, ()),
        ({"x_train": np.zeros((30, 6), np.uint8)}, ("FILE.csv",)),
        ({"x_train": np.zeros((30, 6, 5, 7), np.uint8)}, ()),
        ({"x_train": np.zeros((0, 6, 5, 3), np.uint8), "y_train": np.zeros(0, int)}, ()),
        ({"x_test": np.zeros((9, 8, 8, 3), np.uint8)}, ()),
        ({"y_train": np.arange(30) % 3 + 1, "y_test": np.arange(9) % 3 + 1}, ()),
        ({"y_train": np.arange(30) % 3 * 2, "y_test": np.arange(9) % 3 * 2}, ()),
        ({"y_test": np.arange(9)}, ("6", "9", "3", "4", "5", "7", "8")),
        ({"y_train": np.arange(30) % 3 - 1}, ("0",)),
        ({"y_train": np.full(30, 2**63, np.uint64)}, ("0",)),
        ({"y_train": np.arange(29) % 3}, ()),
        ({"y_train": np.array(["a"] * 30)}, ()),
    ],
)
def test_wrong_npz_files_say_what_is_wrong(tmp_path, changes, named):
    write_npz(tmp_path / "a.npz", **changes)
    with raises(DataError, *named):
        load_dataset(f"npz:{tmp_path / 'a.npz'}")


def test_advice_on_labels_keeps_every_sample_in_its_class(tmp_path):
    """What the messages say to run is run: a class that y_train lacks must not become the next one."""
    y_train, y_test = np.array([0, 1, 3] * 10), np.arange(9) % 4
    write_npz(tmp_path / "a.npz", y_train=y_train, y_test=y_test)
    with raises(DataError, "2", "9") as missing:
        load_dataset(f"npz:{tmp_path / 'a.npz'}")
    advice = str(missing.value).partition("renumber both parts together: ")[2]
    names = np.array(["cat", "cow", "dog", "pig"])
    for y in ((y_train, y_test), (names[y_train], names[y_test])):
        found = {"numpy": np, "y_train": y[0], "y_test": y[1]}
        first, *rest = advice.replace(", then", ";").replace(" and ", ";").split(";")
        exec(first, found)  # noqa: S102 - the advice itself
        assert [eval(line, found).tolist() for line in rest] == [y_train.tolist(), y_test.tolist()]  # noqa: S307
    kept = y_test != 2
    arrays = {"y_train": np.array([0, 1, 2] * 10), "y_test": np.where(y_test == 3, 2, y_test)[kept]}
    write_npz(tmp_path / "a.npz", **arrays, x_test=np.zeros((int(kept.sum()), 6, 5, 3), np.uint8))
    assert load_dataset(f"npz:{tmp_path / 'a.npz'}").num_classes == 3


def test_damaged_npz_files(tmp_path):
    path = tmp_path / "a.npz"
    write_npz(path)
    content = path.read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    single = (tmp_path / "array.npy").read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 4] ^= 255
    for damaged in (b"", b"PK\x03\x04", content[: len(content) // 2], bytes(flipped), single, b"text"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.npz"):
            load_dataset(f"npz:{path}")
    with raises(DataError, "b.npz"):
        read_npz(tmp_path / "b.npz")
    with raises(DataError, Path.cwd() / "b.npz", "--data-dir"):
        load_dataset("npz:b.npz")


@pytest.mark.parametrize("written", ["a.npz", "sub/a.npz", "/nowhere/a.npz"])
def test_a_file_that_has_moved_is_found_in_the_data_dir(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    write_npz(there / "a.npz")
    assert load_dataset(f"npz:{written}", there).name == "npz:a.npz"
    if written == "sub/a.npz":
        (there / "sub").mkdir()
        write_npz(there / "sub" / "a.npz", more=np.zeros(1))
        (note,) = load_dataset(f"npz:{written}", there).notes
        assert note.endswith("arrays not used: 'more'"), "the nearer one"


def test_a_run_goes_on_where_its_data_has_moved(cli, tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    write_npz(tmp_path / "here" / "a.npz")
    monkeypatch.chdir(tmp_path / "here")
    options = ("--clients", 2, "--workers", 0, "--out", tmp_path / "run")
    assert cli("train", "--dataset", "npz:a.npz", "--rounds", 1, *options).exit_code == 0
    (tmp_path / "here" / "a.npz").rename(tmp_path / "there" / "a.npz")
    again = ("resume", tmp_path / "run", "--rounds", 2)
    assert "--data-dir or FEDCORE_DATA names its folder" in cli(*again).stderr
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("FEDCORE_DATA", str(tmp_path / "there"))
        assert cli("evaluate", tmp_path / "run").exit_code == 0
    assert cli(*again, "--data-dir", tmp_path / "there").exit_code == 0


def test_what_is_there_and_not_used_is_named(tmp_path):
    write_npz(tmp_path / "a.npz")
    assert load_dataset(f"npz:{tmp_path / 'a.npz'}").notes == ()
    write_npz(tmp_path / "b.npz", x_val=np.zeros(3), **{f"z\x1b{i:02}": np.zeros(1) for i in range(10)})
    (note,) = load_dataset(f"npz:{tmp_path / 'b.npz'}").notes
    assert note.startswith(f"{tmp_path / 'b.npz'}: arrays not used: 'x_val', 'z\\x1b00', ")
    assert note.endswith("'z\\x1b08' and 1 more")


@pytest.mark.parametrize(
    ("options", "named"),
    [("part=yes&part=no", "'part'"), ("part=yess", "'yess'"), ("part=yes&size=8", "'size'"), ("size=8", "'size'")],
)
def test_options_that_would_be_left_out_are_refused(tmp_path, options, named):
    write_npz(tmp_path / "a.npz")
    with raises(ConfigError, named):
        load_dataset(f"npz:{tmp_path / 'a.npz'}?{options}")


def test_one_clients_part_may_lack_classes_and_nothing_else(tmp_path):
    write_npz(tmp_path / "a.npz", y_train=np.arange(30) % 2 * 3, y_test=np.arange(9) % 2 + 3)
    for options in ("", "?part=no"):
        with raises(DataError, "4", "9"):
            load_dataset(f"npz:{tmp_path / 'a.npz'}{options}")
    part = load_dataset(f"npz:{tmp_path / 'a.npz'}?part=yes")
    assert (part.name, part.num_classes) == ("npz:a.npz", 5)
    write_npz(tmp_path / "a.npz", y_train=np.arange(30) % 3 - 1)
    with raises(DataError, "0", "-1"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}?part=yes")


def test_two_classes_minus_one_and_one_are_no_class_and_missing_labels(tmp_path):
    write_npz(tmp_path / "a.npz", y_train=np.arange(30) % 2 * 2 - 1, y_test=np.arange(9) % 2 * 2 - 1)
    with raises(DataError, "-1..1", "numpy.unique") as caught:
        load_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert "without a class" not in str(caught.value)
