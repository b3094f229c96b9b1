"""The checks of models and partitioners: what the contract allows passes, what breaks it is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedcore import SplitModel
from fedcore.data import TensorSamples, load_dataset
from fedcore.tools import registry
from fedcore_testing import check_dataset, check_model, check_partitioner
from fedcore_testing.problems import linear
from tests.sentences import raises


class TwoHeads(SplitModel):
    """A second head beside the classifier, for a plugin's term."""

    def __init__(self, num_classes, input_shape):
        super().__init__(nn.Flatten(), 64, num_classes)
        self.second = nn.Linear(64, num_classes)


def with_a_layer_that_nothing_uses(num_classes, input_shape):
    model = linear(num_classes, input_shape)
    model.classifier.unused = nn.Linear(3, 3)
    return model


def test_a_second_head_may_be_there():
    check_model(TwoHeads)


def test_a_layer_that_nothing_uses_is_found():
    with raises(AssertionError, "'classifier.unused.weight'"):
        check_model(with_a_layer_that_nothing_uses)


def test_a_data_set_itself_is_checked_too():
    digits = load_dataset("digits")
    check_dataset(digits)
    with raises(AssertionError, "0", "9", "8"):
        check_dataset(replace(digits, num_classes=9, class_names=()))


def test_a_cell_without_a_number_is_found_in_any_row():
    table = load_dataset("breast-cancer")
    rows = torch.zeros(400, 30)
    rows[300, 3] = float("nan")
    with raises(AssertionError):
        check_dataset(replace(table, train=TensorSamples(rows, torch.arange(400) % 2)))


def by_brightness(labels, num_clients, *, dataset, rows, **_):
    """Give the darkest images to the first client, and so on."""
    brightness = dataset.train.gather(torch.from_numpy(rows)).flatten(1).mean(dim=1)
    return list(np.array_split(brightness.argsort(stable=True).numpy(), num_clients))


def of_all_rows(labels, num_clients, *, dataset, **_):
    """Assign rows of the data set, where positions into the labels are asked for."""
    return list(np.array_split(np.arange(len(dataset.train)), num_clients))


def one_for_all(labels, num_clients, **_):
    return [np.arange(5)] * num_clients


@pytest.mark.filterwarnings("ignore::fedcore.data.PartitionWarning")
@pytest.mark.parametrize("name", ["iid", "dirichlet", "dirichlet-clients", "shards", "classes", "quantity", "natural"])
def test_the_bundled_partitioners_pass(name):
    check_partitioner(registry.resolve("partitioner", name))


def test_a_partitioner_that_reads_the_data_passes():
    check_partitioner(by_brightness)
    check_partitioner(by_brightness, dataset=load_dataset("breast-cancer"), clients=(3,))


def test_positions_in_the_data_set_in_place_of_the_labels_are_found():
    with raises(AssertionError):
        check_partitioner(of_all_rows)


def test_a_sample_of_several_clients_is_found_unless_it_is_declared(monkeypatch):
    with raises(AssertionError):
        check_partitioner(one_for_all)
    monkeypatch.setattr(one_for_all, "shares_samples", True, raising=False)
    check_partitioner(one_for_all)
