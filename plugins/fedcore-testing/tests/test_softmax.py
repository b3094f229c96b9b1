"""Softmax regression by hand: torch's loss and gradients, and the samples that a run's clients hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcore.data import load_dataset
from fedcore_testing import client_arrays, federate, linear, mean_by_hand, partition_of, softmax_by_hand


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_loss_and_gradient_are_torchs(scale):
    stream = torch.Generator().manual_seed(0)
    model = linear(4, (3,)).double()
    x = scale * torch.randn(6, 3, generator=stream, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 1, 2, 0])
    expected = torch.nn.functional.cross_entropy(model(x).logits, labels)
    expected.backward()
    w = {name: p.detach().numpy() for name, p in model.named_parameters()}
    loss, gradient = softmax_by_hand(w, x.numpy(), np.eye(4)[labels.numpy()])
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert set(gradient) == set(w)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(gradient[name], p.grad, rtol=1e-10, atol=1e-14)


def test_a_mean_of_models_is_weighted():
    models = [{"a": np.array([1.0, -2.0]), "b": np.array(4.0)}, {"a": np.array([5.0, 2.0]), "b": np.array(0.0)}]
    found = mean_by_hand(models, [3, 1])
    assert {name: value.tolist() for name, value in found.items()} == {"a": [2.0, -1.0], "b": 3.0}


def test_arrays_are_the_clients_samples(tmp_path):
    result = federate(tmp_path, rounds=1, client_test_fraction=0.25)
    data, partition = load_dataset("digits", None).train, partition_of(result)
    for held_out, parts in ((False, partition.train), (True, partition.test)):
        arrays = client_arrays(result, held_out=held_out)
        assert [len(x) for x, _ in arrays] == [len(part) for part in parts]
        for (x, y), part in zip(arrays, parts, strict=True):
            assert (x.shape, x.dtype) == ((len(part), 64), np.float64)
            np.testing.assert_array_equal(x, data.gather(part).flatten(1).numpy())
            assert (y.sum(axis=1) == 1).all()
            assert y.argmax(axis=1).tolist() == data.labels[part].tolist()
