"""Resident samples: normalisation, both storages, and the way to another process."""

import numpy as np
import pytest
import torch

from fedcore.base.errors import DataError, UnknownNameError
from fedcore.data import Dataset, ResidentSamples, TensorSamples, images
from fedcore.data.client_data import ClientData
from tests.sentences import raises

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
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, dtype=torch.int32), (0.0,)),
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
    with raises(UnknownNameError, "'cifar-10'"):
        ClientData.training(dataset, *part, augmented=True)


class Shifted:
    def draw(self, n, generator):
        return torch.rand(n, 1, generator=generator)

    def apply(self, x, drawn, mean, std):
        assert mean == std == ()
        return x + drawn[:, :, None]


SHIFTED = Shifted()


def test_samples_other_than_images_are_augmented():
    series = TensorSamples(torch.zeros(20, 6, 2), torch.arange(20) % 4)
    dataset = Dataset("own", series, series, 4, (6, 2), augmentation=f"module:{__name__}.SHIFTED")
    data = ClientData.training(dataset, torch.arange(20), torch.device("cpu"), augmented=True)
    (picked,) = data.batches(torch.arange(20), 20, lambda: torch.Generator().manual_seed(0))
    drawn = torch.rand(20, 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(data.inputs_of(picked), drawn[:, :, None].expand(20, 6, 2))
