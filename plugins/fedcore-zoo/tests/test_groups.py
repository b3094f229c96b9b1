"""Groups of samples, such as patients: on one side of every split, with sizes as they were on average."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedcore
from fedcore import ConfigError, DataError, RunConfig
from fedcore.data import load_dataset, make_partition
from fedcore_testing import small_config
from tests.sentences import raises


def grouped(size=5):
    """Return the digits in groups of shuffled samples."""
    digits = load_dataset("digits")
    order = np.random.default_rng(0).permutation(len(digits.train)) // size
    return replace(digits, groups=torch.from_numpy(order))


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_a_group_is_at_one_client_and_on_one_side(partition):
    data = grouped()
    options = RunConfig(partition=partition, clients=5, client_test_fraction=0.3, classes_per_client=4)
    split = make_partition(data, options)
    homes: dict[int, set[int]] = {}
    for number, part in enumerate([*split.train, *split.test]):
        for group in data.groups[part].tolist():
            homes.setdefault(group, set()).add(number)
    assert all(len(places) == 1 for places in homes.values())
    used = torch.cat([split.train.positions, split.test.positions])
    assert sorted(used.tolist()) == list(range(len(data.train)))
    share = len(split.test.positions) / len(used)
    assert share == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / len(homes)) ** 0.5)


def test_groups_of_one_sample_change_nothing():
    data = load_dataset("digits")
    options = RunConfig(clients=5, client_test_fraction=0.3)
    alone = replace(data, groups=torch.arange(len(data.train)))
    whole, single = make_partition(alone, options), make_partition(data, options)
    for name in ("train", "test"):
        for one, other in zip(getattr(whole, name), getattr(single, name), strict=True):
            assert one.tolist() == sorted(other.tolist())


def test_a_run_keeps_groups_whole_and_options_that_would_split_them_are_refused(tmp_path):
    data = grouped()
    config = small_config(tmp_path, rounds=1, client_test_fraction=0.3)
    assert fedcore.run(config, dataset=data, progress=False).metrics["global_local"]["clients"] == 3
    for option, value in (("validation_share", 0.5), ("public", "0.1")):
        with raises(ConfigError, f"--{option.replace('_', '-')}"):
            fedcore.run(config.model_copy(update={option: value}), dataset=data, progress=False)
    few = replace(data, groups=torch.arange(len(data.train)) // 800)
    with raises(ConfigError, "client 0", "2 groups", "3 clients"):
        fedcore.run(config.model_copy(update={"partition": "iid"}), dataset=few, progress=False)


def images(folder: Path, *, overlap: bool = False, stray: bool = False) -> Path:
    for part, patients in (("train", range(6)), ("test", range(5 if overlap else 6, 8))):
        for label in ("ill", "well"):
            for patient in patients:
                place = folder / part / label / f"p{patient}"
                place.mkdir(parents=True)
                for image in range(3):
                    Image.new("RGB", (8, 8), (patient, image, 0)).save(place / f"{image}.png")
    if stray:
        Image.new("RGB", (8, 8)).save(folder / "train" / "ill" / "loose.png")
    return folder


def test_the_folders_below_the_classes_are_patients(tmp_path):
    data = load_dataset(f"imagefolder:{images(tmp_path / 'set')}?groups=folder")
    assert data.groups.tolist() == 2 * [patient for patient in range(6) for _ in range(3)]
    split = make_partition(data, RunConfig(partition="iid", clients=2, client_test_fraction=0.4))
    sides = [{*data.groups[part].tolist()} for part in (*split.train, *split.test)]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 6


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"overlap": True}, ("1 groups", "p5")),
        ({"stray": True}, ("loose.png", "CLASS/GROUP/IMAGE")),
    ],
)
def test_patients_in_both_parts_and_images_without_one_are_refused(tmp_path, how, named):
    with raises(DataError, *named):
        load_dataset(f"imagefolder:{images(tmp_path / 'set', **how)}?groups=folder")


def test_another_level_is_refused(tmp_path):
    with raises(ConfigError, "groups", "'patient'", "folder"):
        load_dataset(f"imagefolder:{tmp_path}?groups=patient")


def test_a_single_class_is_noted(tmp_path, recwarn):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.zeros(40, dtype=int)
    config = small_config(tmp_path, clients=2, partition="iid", rounds=1)
    fedcore.run(config, dataset=(x, y, x, y), progress=False)
    assert any("has a single class, so every model is right" in str(warning.message) for warning in recwarn)
