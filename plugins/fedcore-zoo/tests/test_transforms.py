"""torchvision's transforms as augmentation: what they do to a batch, seeds and engines, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedcore import ConfigError, RunConfig, UnknownNameError
from fedcore.data import load_dataset
from fedcore_testing import federations, model_bytes
from fedcore_zoo import Transforms
from fedcore_zoo.transforms import masks_stay, torchvision
from tests.sentences import raises

go = federations()
RANDOM = "torchvision:RandomHorizontalFlip,RandomRotation=15"


class Shifts(nn.Module):
    """Adds a number that Python draws."""

    def forward(self, image):
        return image + random.gauss(0, 0.1)


shifts = Transforms(Shifts())


def test_images_are_changed_before_normalisation():
    x, mean, std = torch.rand(4, 3, 6, 6), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    shift, scale = (torch.tensor(each).view(1, 3, 1, 1) for each in (mean, std))
    flips = torchvision("RandomHorizontalFlip=1.0")
    drawn = flips.draw(4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(flips.apply((x - shift) / scale, drawn, mean, std), (x.flip(3) - shift) / scale)
    seen = []
    Transforms(lambda image: seen.append(image) or image).apply((x - shift) / scale, drawn, mean, std)
    torch.testing.assert_close(torch.stack(seen), x)


@pytest.mark.parametrize("raw", [255 * torch.rand(4, 3, 6, 6), torch.randn(4, 3, 6, 6)])
def test_images_of_floats_keep_their_values(raw):
    """They were cut to 0..1, so that images of 0..255 became white: a flip that never happens cost 52 points."""
    mean, std = raw.mean((0, 2, 3)).tolist(), raw.std((0, 2, 3)).tolist()
    shift, scale = (torch.tensor(each).view(1, 3, 1, 1) for each in (mean, std))
    x, flips, jitter = (raw - shift) / scale, torchvision("RandomHorizontalFlip=1.0"), torchvision("ColorJitter=0.5")
    drawn = flips.draw(4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(flips.apply(x, drawn, mean, std), x.flip(3))
    with raises(ConfigError, "colours", "uint8", "--normalize client"):
        jitter.apply(x, drawn, mean, std)
    raw = torch.rand(4, 3, 6, 6)
    assert not torch.equal(jitter.apply((raw - shift) / scale, drawn, mean, std), (raw - shift) / scale)


def test_each_image_has_its_seed_and_the_global_generators_stay():
    x = torch.zeros(3, 1, 2, 2)
    drawn = shifts.draw(3, torch.Generator().manual_seed(1))
    random.seed(5)
    state, torch_state = random.getstate(), torch.get_rng_state()
    first = shifts.apply(x, drawn, (), ())
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert len(first[:, 0, 0, 0].unique()) == 3
    torch.testing.assert_close(shifts.apply(x[:1], drawn[2:], (), ()), first[2:])


def test_the_option_switches_it_on_and_engines_have_the_same_bits(go):
    result = go({}, augmentation=RANDOM, clients=2, rounds=1)
    assert result.config.augment
    assert RunConfig(**result.config.written()).augmentation == RANDOM
    assert model_bytes(result) == model_bytes(go({}, augmentation=RANDOM, clients=2, rounds=1, workers=1))
    assert model_bytes(result) != model_bytes(go({}, clients=2, rounds=1))
    off = go({}, augmentation=RANDOM, augment=False, clients=2, rounds=1)
    assert model_bytes(off) == model_bytes(go({}, clients=2, rounds=1))


def test_what_cannot_be_made_is_refused(go):
    with raises(UnknownNameError, "'RandomRotatio'", "'RandomRotation'"):
        go({}, augmentation="torchvision:RandomRotatio")
    with pytest.raises(ConfigError, match="torchvision:RandomRotation cannot be made"):
        go({}, augmentation="torchvision:RandomRotation")
    with raises(ConfigError, "--augment", "'digits'"):
        go({}, augment=True)
    halves = torchvision("CenterCrop=3")
    with raises(ConfigError, "(1, 6, 6)", "(1, 3, 3)"):
        halves.apply(torch.rand(1, 1, 6, 6), torch.zeros(1, 1), (), ())


@pytest.mark.parametrize("name", ["torchvision:GaussianBlur=3,RandomHorizontalFlip", "cifar10"])
def test_masks_would_not_move_with_their_pixels(go, name):
    """A flip cost 9.6 points of Dice, a rotation half of it."""
    pytest.importorskip("fedcore_tasks")
    how = {"dataset": "digit-shapes", "model": "auto", "samples": 40, "clients": 2, "rounds": 1}
    with raises(ConfigError, "masks", "'segmentation'"):
        go({}, augmentation=name, **how)
    assert go({}, augmentation="torchvision:GaussianBlur=3", **how).metrics["global"]["dice"] >= 0
    blurred = replace(load_dataset("digit-shapes"), augmentation="torchvision:GaussianBlur=3")
    assert masks_stay(blurred).notes[-1].endswith("the masks of task 'segmentation' stay where they are")


def test_code_of_a_file_needs_permission(cli, tmp_path):
    (tmp_path / "config.yaml").write_text("augmentation: module:os.system\n")
    result = cli("train", "--config", tmp_path / "config.yaml")
    assert result.exit_code == 2
    assert "--allow-code" in result.stderr
