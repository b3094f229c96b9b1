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
