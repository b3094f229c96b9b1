"""The table of a partition, for any number of clients and classes."""

import io
import re

import pytest
from rich.console import Console

from fedcore.data import Partition, load_partition
from fedcore_console.partition_table import draw_table
from tests.data.labelled import DATASET, make_dataset, partitioned


def rendered(partition, dataset=DATASET, width=400, **options):
    out = io.StringIO()
    table = draw_table(partition, dataset.train.labels, dataset.num_classes, width)
    Console(file=out, width=width, **options).print(table)
    return out.getvalue()


def test_table_holds_every_count_and_the_sums():
    partition = partitioned()
    lines = rendered(partition).splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := line.split()) > 5}
    counts = partition.class_counts(DATASET.train.labels, 10)
    for client, row in enumerate(counts.tolist()):
        train, held_out = len(partition.train[client]), len(partition.test[client])
        shown = [str(n) for n in row if n] + [str(sum(n > 0 for n in row)), str(train), str(held_out)]
        assert rows[str(client)] == shown
    assert rows["total"][:10] == [str(n) for n in counts.sum(dim=0).tolist()]
    assert rows["total"][-3:] == ["10", str(int(counts.sum())), str(600 - int(counts.sum()))]
    assert "\x1b[" in rendered(partition, force_terminal=True, color_system="truecolor")


def test_the_median_of_an_even_number_of_clients_is_between_two():
    parts = [range(1), range(1, 7), range(7, 24), range(24, 400)]  # 1, 6, 17, 376 samples
    row = next(line for line in rendered(Partition(parts, [[]] * 4)).splitlines() if "median" in line)
    assert re.findall(r"[\d.]+", row)[-2:] == ["11.5", "0"]


def test_table_of_many_clients_and_classes_stays_small():
    dataset = make_dataset(5000, classes=100)
    text = rendered(partitioned(dataset, partition="iid", clients=100), dataset)
    clients = [int(line.split()[0]) for line in text.splitlines() if re.match(r"\d+ ", line)]
    assert clients == [*range(20), *range(95, 100)]
    assert "96-99" in text
    assert "…" in text


@pytest.mark.parametrize(("width", "classes"), [(80, 10), (80, 53), (120, 100)])
def test_a_narrow_table_joins_classes_instead_of_cutting_numbers_off(width, classes):
    dataset = make_dataset(5000, classes=classes)
    partition = partitioned(dataset, partition="iid", clients=5)
    text = rendered(partition, dataset, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert f"{classes - 1} classes train held out" in text
    assert (" 0-" in text) == (classes > 10)


def test_names_in_a_file_are_not_markup(tmp_path):
    partition = partitioned()
    partition.info["dataset"] = "[/red] [bold]x"
    partition.save(tmp_path / "split.json")
    assert "[/red] [bold]x" in rendered(load_partition(tmp_path / "split.json", DATASET))
