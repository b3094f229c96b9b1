"""Where tensors lie: the fixed rule, the user's choice, the measured one; the same training in every format."""

import pytest
import torch
from torch import nn

from fedcore import ConfigError, RunConfig, SplitModel
from fedcore.client.messages import ClientSite
from fedcore.data import ResidentSamples
from fedcore.models import build_model
from fedcore.models.placement import Placement, forward_chunk
from fedcore.runs.resolve import resolve_config, resolve_partition
from fedcore_workers import pack_site, unpack_site
from tests import support
from tests.sentences import raises

IMAGES = {"dataset": "module:tests.models.test_placement.images", "model": "simple-cnn", "workers": 0}


def images(data_dir=None):
    from fedcore.data import Dataset

    stream = torch.Generator().manual_seed(0)

    def samples(n):
        x = torch.randn(n, 3, 16, 16, generator=stream)
        return ResidentSamples(x, torch.arange(n) % 4, [0.0] * 3, [1.0] * 3)

    return Dataset("images", samples(120), samples(40), 4, (3, 16, 16))


def model(name="simple-cnn"):
    return build_model(name, num_classes=4, input_shape=(3, 16, 16), seed=0, projection=False)[0]


@pytest.mark.parametrize(
    ("name", "chosen", "expected"),
    [
        ("simple-cnn", "auto", torch.channels_last),
        ("mlp", "auto", torch.contiguous_format),
        ("simple-cnn", "contiguous", torch.contiguous_format),
        ("mlp", "channels_last", torch.channels_last),
    ],
)
def test_the_rule_and_the_choice(name, chosen, expected):
    config = RunConfig(device="cpu", memory_format=chosen)
    sample = torch.zeros(1, 3, 16, 16)
    assert Placement.of(config, model(name), sample).memory_format == expected


def test_models_and_data_lie_as_they_should_and_hold_the_same():
    placement = Placement(torch.device("cpu"), torch.channels_last)
    plain, placed = model(), placement.model(model())
    assert placed.encoder.base.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(plain.parameters(), placed.parameters(), strict=True):
        assert torch.equal(a, b)
    samples, rows = images().train, torch.tensor([3, 0, 3])
    moved = placement.dataset(images()).train
    assert torch.equal(samples.gather(rows), moved.gather(rows))
    assert moved.gather(rows).is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_contiguous() for tensor in moved.tensors().values())


def test_images_in_channels_last_are_sent_to_workers_and_used_there_without_a_copy(tmp_path):
    placement = Placement(torch.device("cpu"), torch.channels_last)
    config, dataset = resolve_config(support.config(tmp_path, **IMAGES))
    placed = placement.on_host(dataset)
    assert placement.dataset(placed).train is placed.train
    packed = pack_site(ClientSite(config, placed, resolve_partition(config, placed), tmp_path))
    there = placement.dataset(unpack_site(packed).dataset).train
    assert there.images.is_contiguous(memory_format=torch.channels_last)
    assert any(there.images.data_ptr() == tensor.data_ptr() for tensor in packed.values())
    assert torch.equal(there.images, dataset.train.images)


@pytest.mark.parametrize("plugins", [(), ("moon", "fedprox"), ("scaffold",)], ids="+".join)
def test_both_formats_train_alike(go, plugins):
    one = go(*plugins, **IMAGES, memory_format="channels_last", rounds=2)
    other = go(*plugins, **IMAGES, memory_format="contiguous", rounds=2)
    for (name, a), b in zip(support.weights(one).items(), support.weights(other).values(), strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_channels_last_gives_the_same_bits_for_any_number_of_workers(go, workers):
    here = go("moon", **IMAGES, rounds=2)
    there = go("moon", **{**IMAGES, "workers": workers}, rounds=2)
    assert support.model_bytes(here) == support.model_bytes(there)


class Viewed(torch.nn.Module):
    """Joins channels with height and width by ``view``, as most code of the field does, also in training alone."""

    def __init__(self, num_classes, input_shape, only_in_training=False):
        super().__init__()
        self.conv = torch.nn.Conv2d(input_shape[0], 4, 3)
        self.last = torch.nn.Linear(4 * (input_shape[1] - 2) * (input_shape[2] - 2), num_classes)
        self.only_in_training = only_in_training

    def forward(self, x):
        x = self.conv(x).relu()
        viewed = x.view(len(x), -1) if self.training or not self.only_in_training else x.flatten(1)
        return self.last(viewed)


def viewed_in_training(num_classes, input_shape):
    return Viewed(num_classes, input_shape, only_in_training=True)


@pytest.mark.parametrize("network", [Viewed, viewed_in_training])
@pytest.mark.parametrize("dataset", ["digits", IMAGES["dataset"]])
def test_a_network_with_a_view_runs_in_the_contiguous_format(go, network, dataset):
    result = go(model=network, dataset=dataset, workers=0)
    contiguous = go(model=network, dataset=dataset, workers=2, memory_format="contiguous")
    assert support.model_bytes(result) == support.model_bytes(contiguous)
    with raises(ConfigError, "--memory-format", "channels_last"):
        go(model=network, dataset=dataset, memory_format="channels_last")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_advice_to_a_network_of_another_dtype_is_to_convert_it(go, dtype):
    with pytest.raises(ConfigError, match=rf"Its weights are {dtype}: .* network.float\(\)".replace("torch.", "")):
        go(model=lambda num_classes, input_shape: Viewed(num_classes, input_shape).to(dtype))


def test_a_pass_holds_fewer_samples_with_large_logits() -> None:
    cpu = torch.device("cpu")
    assert forward_chunk(cpu) == forward_chunk(cpu, 10) == forward_chunk(cpu, 1000) == 100
    assert forward_chunk(cpu, 50257, 128) == 4  # a language model's: 26 million numbers
    assert forward_chunk(cpu, 50257, 100_000) == 1
    assert forward_chunk(torch.device("cuda"), 10) == 2000


class PartOfALarger(nn.Module):
    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        table = torch.arange(64 * 48.0).sin().view(64, 48)[:, :16]
        self.weight = nn.Parameter(table.contiguous() if contiguous else table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.flatten(1) @ self.weight)


def part_of_a_larger(num_classes, input_shape):
    return SplitModel(PartOfALarger(contiguous=False), 16, num_classes)


def with_own_memory(num_classes, input_shape):
    return SplitModel(PartOfALarger(contiguous=True), 16, num_classes)


def test_a_parameter_that_is_a_part_of_a_larger_tensor_is_trained_like_any_other(tmp_path):
    """Torch's fused optimizers paired its numbers with gradients of others."""
    runs = [support.run(tmp_path, model=model, workers=0) for model in (part_of_a_larger, with_own_memory)]
    ours, theirs = map(support.weights, runs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor)
