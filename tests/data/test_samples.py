"""Resident samples: normalisation, both storages, and the way to another process."""

import numpy as np
import pytest
import torch

from fedcore.base.errors import DataError, UnknownNameError
from fedcore.data import Dataset, ResidentSamples, images
from fedcore.data.client_data import ClientData

MEAN, STD = (0.3, 0.5, 0.1), (0.2, 0.25, 0.7)


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (20, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def labels():
    return torch.arange(20) % 4


def test_gather_normalises_as_written_down(pixels, labels):
    indices = torch.tensor([3, 3, 19, 0])
    batch = ResidentSamples.from_pixels(pixels, labels, MEAN, STD).gather(indices)
    shape = (1, 3, 1, 1)
    expected = (pixels.numpy()[indices] / 255 - np.reshape(MEAN, shape)) / np.reshape(STD, shape)
    assert batch.dtype == torch.float32
    np.testing.assert_allclose(batch.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_large_sets_stay_bytes_and_give_the_same_bits(pixels, labels, monkeypatch):
    small = ResidentSamples.from_pixels(pixels, labels, MEAN, STD)
    monkeypatch.setattr(images, "MAX_FLOAT_BYTES", 4 * pixels.numel() - 1)
    large = ResidentSamples.from_pixels(pixels, labels, MEAN, STD)
    assert (small.images.dtype, large.images.dtype) == (torch.float32, torch.uint8)
    indices = torch.tensor([7, 0, 7])
    assert torch.equal(small.gather(indices), large.gather(indices))


def test_making_samples_leaves_the_callers_floats_alone(pixels, labels):
    floats = pixels.float()
    before = floats.clone()
    made = ResidentSamples.from_pixels(floats, labels, MEAN, STD)
    assert torch.equal(floats, before)
    assert made.images[0, 1, 0, 0] == pytest.approx((float(before[0, 1, 0, 0]) - 0.5) / 0.25, rel=1e-5)


@pytest.mark.parametrize(
    ("images", "labels", "mean"),
    [
        (torch.zeros(2, 1, 3), torch.zeros(2, dtype=torch.int64), (0.0,)),
        (torch.zeros(2, 1, 3, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), (0.0,)),
        (torch.zeros(2, 1, 3, 3), torch.zeros(3, dtype=torch.int64), (0.0,)),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2), (0.0,)),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.int64), (0.0, 0.0)),
    ],
)
def test_wrong_shapes_and_types_are_refused(images, labels, mean):
    with pytest.raises(DataError):
        ResidentSamples(images, labels, mean, (1.0,))


def test_an_augmentation_that_no_package_provides_is_refused(pixels, labels):
    whole = ResidentSamples.from_pixels(pixels, labels, MEAN, STD)
    dataset = Dataset("own", whole, whole, 4, (3, 5, 4), augmentation="cifar-10")
    part = torch.arange(4), torch.device("cpu")
    assert not ClientData.training(dataset, *part, augmented=False).varies
    with pytest.raises(UnknownNameError, match="unknown augmentation 'cifar-10'"):
        ClientData.training(dataset, *part, augmented=True)
