"""Samples that are no images: rows of a table and sequences of different lengths."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fedcore.base.errors import DataError
from fedcore.data import TensorSamples
from fedcore_zoo import SequenceSamples, gather_runs
from tests.sentences import raises

TEXTS = [[5, 1, 5], [], [2], [7, 7, 0, 3], [4]]
LABELS = [0, 1, 0, 2, 1]


def sequences():
    return SequenceSamples.of(TEXTS, LABELS)


@pytest.mark.parametrize("chosen", [[3, 0, 3], [1], [1, 1], [4, 3, 2, 1, 0]])
def test_a_batch_of_sequences_is_what_a_loop_over_them_gives(chosen):
    batch = sequences().gather(torch.tensor(chosen))
    offsets = batch.offsets.tolist()
    assert [batch.values[a:b].tolist() for a, b in pairwise(offsets)] == [TEXTS[i] for i in chosen]
    assert len(offsets) == len(chosen) + 1


def test_sequences_of_vectors_keep_their_width():
    values = torch.arange(12.0).view(6, 2)
    samples = SequenceSamples(values, torch.tensor([0, 2, 6]), torch.tensor([0, 1]))
    assert torch.equal(samples.gather(torch.tensor([1])).values, values[2:])


def test_runs_of_a_long_tensor_are_gathered_in_order():
    sizes = np.random.default_rng(0).integers(0, 9, size=200)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    chosen = torch.from_numpy(np.random.default_rng(1).integers(0, 200, size=77))
    rows, found = gather_runs(offsets, chosen)
    expected = [row for i in chosen.tolist() for row in range(int(offsets[i]), int(offsets[i + 1]))]
    assert rows.tolist() == expected
    assert found.diff().tolist() == sizes[chosen.numpy()].tolist()


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        ([0, 2, 1, 9], ("0", "9")),
        ([1, 9], ("0", "9")),
        ([0, 8], ("0", "9")),
        ([], ("1",)),
        ([0.0, 9.0], ()),
    ],
)
def test_offsets_that_divide_nothing_are_refused(offsets, named):
    with raises(DataError, *named):
        SequenceSamples(torch.arange(9), torch.tensor(offsets), torch.zeros(max(len(offsets) - 1, 0), dtype=torch.long))


@pytest.mark.parametrize("labels", [torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)])
def test_labels_that_do_not_belong_to_the_samples_are_refused(labels):
    with raises(DataError, "5"):
        TensorSamples(torch.zeros(5, 2), labels)
    with raises(DataError, "5"):
        SequenceSamples(torch.arange(9), sequences().offsets, labels)


def test_labels_in_an_array_are_told_from_a_tensor():
    with raises(DataError, "5"):
        TensorSamples(torch.zeros(5, 2), np.zeros(5, np.int64))


@pytest.mark.parametrize("stats", [{"mean": [0.0, 0.0]}, {"mean": [0.0], "std": [1.0]}])
def test_mean_and_std_have_a_number_for_each_column(stats):
    with raises(DataError, "5", "2"):
        TensorSamples(torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64), **stats)
