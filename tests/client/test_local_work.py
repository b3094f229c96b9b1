"""The length of a client's training, counted by hand."""

import pytest

from fedcore import RunConfig
from fedcore.client.local_work import LocalWork


@pytest.mark.parametrize(
    ("options", "asked", "samples", "smallest_batch", "expected"),
    [
        ({"local_epochs": 3}, {}, 10, 1, (3, None, True)),
        ({"local_epochs": 3}, {"epochs": 1}, 10, 1, (1, None, True)),
        ({"local_steps": 6}, {}, 10, 1, (2, 6, True)),  # batches of 4, 4, 2: three steps per epoch
        ({"local_steps": 7}, {}, 10, 1, (3, 7, True)),
        ({"local_steps": 2}, {}, 10, 1, (1, 2, False)),  # 8 of 10 samples
        ({"local_steps": 6}, {"steps": 2}, 10, 1, (1, 2, False)),
        ({"local_steps": 4}, {}, 9, 2, (2, 4, True)),  # batches of 4, 4; the one of 1 is skipped
        ({"local_steps": 4}, {}, 1, 2, (0, 4, True)),  # no batch is large enough
    ],
)
def test_epochs_and_steps(options, asked, samples, smallest_batch, expected):
    work = LocalWork.of(RunConfig(batch_size=4, **options), samples, smallest_batch, asked)
    assert (work.epochs, work.most_steps, work.sees_all_samples) == expected


@pytest.mark.parametrize(
    ("options", "samples", "smallest_batch", "expected"),
    [
        ({"local_epochs": 3}, 10, 1, (3, None, 4)),  # of 4, 4, 2 the last is left out
        ({"local_steps": 6}, 10, 1, (3, 6, 4)),  # two steps per epoch
        ({"local_steps": 6}, 8, 1, (3, 6, 4)),
        ({"local_steps": 6}, 3, 1, (6, 6, 3)),  # the only batch is trained
        ({"local_steps": 6}, 1, 2, (0, 6, 2)),  # but not where the model needs two samples
    ],
)
def test_the_last_batch_is_left_out(options, samples, smallest_batch, expected):
    config = RunConfig(batch_size=4, drop_last=True, **options)
    work = LocalWork.of(config, samples, smallest_batch, {})
    assert (work.epochs, work.most_steps, work.smallest_batch) == expected


@pytest.mark.parametrize(("samples", "all_of_them", "full_ones"), [(1, 1, 1), (4, 1, 1), (7, 2, 1), (10, 3, 2)])
def test_batches_of_an_epoch(samples, all_of_them, full_ones):
    assert RunConfig(batch_size=4).batches(samples) == all_of_them
    assert RunConfig(batch_size=4, drop_last=True).batches(samples) == full_ones
