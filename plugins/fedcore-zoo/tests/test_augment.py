"""Augmentations against torchvision's functions, one image at a time, for the same drawn numbers."""

import pytest
import torch

from fedcore_zoo import load_torchvision
from fedcore_zoo.augment import CIFAR10, CIFAR100

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3)
SHIFT, SCALE = torch.tensor(MEAN).view(-1, 1, 1), torch.tensor(STD).view(-1, 1, 1)


def augment(name, x, generator, mean, std):
    named = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    return named.apply(x, named.draw(len(x), generator), mean, std)


def generator():
    return torch.Generator().manual_seed(7)


def draws(batch):
    g = generator()
    top, left = torch.randint(0, 9, (2, batch, 1), generator=g)
    flip = torch.rand(batch, 1, generator=g) < 0.5
    angle = (torch.rand(batch, generator=g) * 2 - 1) * 15
    return zip(top.flatten().tolist(), left.flatten().tolist(), flip.flatten().tolist(), angle.tolist())


@pytest.fixture
def pixels():
    return torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def functional():
    load_torchvision()
    import torchvision.transforms.functional as functional

    return functional


def test_cifar10_is_reflecting_pad_crop_and_flip(pixels, functional):
    moved = augment("cifar10", (pixels - SHIFT) / SCALE, generator(), MEAN, STD)
    for image, result, (top, left, flip, _) in zip(pixels, moved, draws(40), strict=True):
        expected = functional.crop(functional.pad(image, 4, padding_mode="reflect"), top, left, 32, 32)
        expected = functional.hflip(expected) if flip else expected
        torch.testing.assert_close(result, (expected - SHIFT) / SCALE)


def test_cifar100_is_black_pad_crop_flip_and_rotation(pixels, functional):
    moved = augment("cifar100", (pixels - SHIFT) / SCALE, generator(), MEAN, STD)
    differing = 0
    for image, result, (top, left, flip, angle) in zip(pixels, moved, draws(40), strict=True):
        expected = functional.crop(functional.pad(image, 4), top, left, 32, 32)
        expected = functional.hflip(expected) if flip else expected
        expected = functional.rotate(expected, angle, fill=[0.0])
        differing += int((~torch.isclose(result, (expected - SHIFT) / SCALE, atol=1e-5)).sum())
    # A pixel half-way between two may round the other way.
    assert differing <= 1e-4 * moved.numel()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_draws_come_from_the_generator_only(pixels, name):
    first = augment(name, pixels, generator(), MEAN, STD)
    torch.rand(1)
    before = torch.get_rng_state()
    assert torch.equal(first, augment(name, pixels, generator(), MEAN, STD))
    assert torch.equal(before, torch.get_rng_state())
    g = generator()
    assert torch.equal(first, augment(name, pixels, g, MEAN, STD))
    assert not torch.equal(first, augment(name, pixels, g, MEAN, STD))


def test_other_sizes_keep_their_shape_and_the_input_stays_as_it_was():
    x = torch.rand(3, 1, 12, 20)
    before = x.clone()
    for name in ("cifar10", "cifar100"):
        assert augment(name, x, generator(), (0.5,), (0.5,)).shape == x.shape
    assert torch.equal(x, before)
