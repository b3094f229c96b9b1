"""Partitions as objects and files: hold-out, hash, reading back, and files from strangers."""

import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console

from fedcore.base.errors import ConfigError, DataError, FedcoreError, PluginContractError
from fedcore.data import Dataset, Partition, ResidentSamples, load_partition, make_partition
from fedcore.data.partition_table import draw_table


def make_dataset(n=600, classes=10, seed=0, name="toy"):
    labels = torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))
    samples = ResidentSamples(torch.zeros(n, 1, 2, 2), labels, (0.0,), (1.0,))
    return Dataset(name, samples, samples, classes, (1, 2, 2))


DATASET = make_dataset()


def make(dataset=DATASET, **changes):
    arguments = {
        "partitioner": "dirichlet",
        "clients": 10,
        "alpha": 0.5,
        "classes_per_client": 2,
        "client_test_fraction": 0.25,
        "seed": 3,
    }
    return make_partition(dataset, **(arguments | changes))


def test_holdout_is_disjoint_by_class_and_of_the_asked_size():
    partition, whole = make(), make(client_test_fraction=0.0)
    labels = DATASET.train.labels
    for train, test, both in zip(partition.train, partition.test, whole.train, strict=True):
        assert torch.equal(torch.cat([train, test]).sort().values, both.sort().values)
        per_class, held = (torch.bincount(labels[i], minlength=10) for i in (both, test))
        assert ((held - 0.25 * per_class).abs() < 1).all()  # by class: never off by a whole sample
        assert (held[per_class == 1] == 0).all()
        assert abs(len(test) - 0.25 * len(both)) <= 0.5 or (held == per_class - 1)[held < per_class].all()
    assert all(len(test) == 0 for test in whole.test)


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_every_client_keeps_training_samples(fraction):
    partition = make(make_dataset(30), clients=30, partitioner="iid", client_test_fraction=fraction)
    assert all(len(train) == 1 for train in partition.train)
    larger = make(client_test_fraction=fraction)
    for train, test in zip(larger.train, larger.test, strict=True):
        labels = DATASET.train.labels
        assert set(labels[test].tolist()) <= set(labels[train].tolist())


def test_few_samples_are_dealt_class_by_class():
    """Of 600 samples 90 are dealt, each class with its share, whoever holds them; others by another seed."""
    labels = DATASET.train.labels
    few = make(samples=90, clients=3)
    dealt = torch.cat([*few.train, *few.test])
    assert len(dealt) == len(dealt.unique()) == 90
    share = torch.bincount(labels[dealt], minlength=10) - 0.15 * torch.bincount(labels, minlength=10)
    assert (share.abs() < 1).all()
    assert few.info["samples"] == 90
    other = make(samples=90, clients=3, seed=4)
    assert set(dealt.tolist()) != set(torch.cat([*other.train, *other.test]).tolist())
    assert make(samples=600).sha256 == make().sha256
    assert "samples" not in make().info


def test_more_samples_than_there_are():
    with pytest.raises(ConfigError, match="--samples is 601, but the data set has 600"):
        make(samples=601)
    with pytest.raises(ConfigError, match="10 clients cannot each get one of 9 samples"):
        make(samples=9)


def test_each_clients_holdout_has_a_stream_of_its_own():
    dataset = make_dataset(classes=1)
    split, whole = (make(dataset, partitioner="iid", client_test_fraction=f) for f in (0.25, 0.0))
    places = {
        tuple(torch.isin(both, test).nonzero().flatten().tolist())
        for both, test in zip(whole.train, split.test, strict=True)
    }
    assert len(places) == 10


def test_same_seed_same_hash_other_seed_other_hash():
    assert make().sha256 == make().sha256
    assert len({make().sha256, make(seed=4).sha256, make(client_test_fraction=0.0).sha256}) == 3


def test_hash_sees_lists_their_order_and_their_borders_only():
    a, b, none = torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([], dtype=torch.int64)
    base = Partition([a, b], [none, none], {})
    different = [
        Partition([b, a], [none, none], {}),
        Partition([a.flip(0), b], [none, none], {}),
        Partition([torch.tensor([0]), torch.tensor([1, 2])], [none, none], {}),
        Partition([a, b], [torch.tensor([3]), none], {}),
    ]
    assert Partition([a, b], [none, none], {"seed": 5}).sha256 == base.sha256
    assert len({base.sha256, *(p.sha256 for p in different)}) == 5


def test_class_counts():
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    none = torch.tensor([], dtype=torch.int64)
    partition = Partition([torch.tensor([0, 3]), torch.tensor([1, 2, 5])], [torch.tensor([4]), none], {})
    assert partition.class_counts(labels, 4).tolist() == [[1, 0, 1, 0], [1, 1, 1, 0]]


def test_saved_and_loaded_again(tmp_path):
    partition = make()
    path = tmp_path / "new" / "split.json"
    partition.save(path)
    again = load_partition(path, DATASET)
    assert again.sha256 == partition.sha256
    assert again.info == partition.info
    assert again.train[0].dtype == torch.int64
    assert [p.name for p in path.parent.iterdir()] == ["split.json"]
    assert load_partition(path, make_dataset(name="renamed")).sha256 == partition.sha256


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "split.json"
    make().save(path)
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(DataError, match="disk full"):
        make(seed=9).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["split.json"]


@pytest.mark.filterwarnings("ignore::fedcore.data.partitioners.PartitionWarning")
def test_reports_are_kept_as_notes():
    assert any("lowered" in note for note in make(make_dataset(45)).info["notes"])


@pytest.mark.parametrize("other", [make_dataset(599), make_dataset(601), make_dataset(seed=1)])
def test_another_data_set_is_refused(tmp_path, other):
    make().save(tmp_path / "split.json")
    with pytest.raises(ConfigError, match="toy"):
        load_partition(tmp_path / "split.json", other)


def edit(content, *keys, value):
    *path, last = keys
    for key in path:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["format"], "other", "format"),
        (["sha256"], "0" * 64, "hash"),
        (["sha256"], None, "hash"),
        (["info"], [], "info"),
        (["info", "alpha"], True, "alpha"),
        (["info", "seed"], "3", "seed"),
        (["info", "notes"], [1], "notes"),
        (["info", "notes"], ["\x1b[2J"], "printable"),
        (["info", "dataset"], None, "dataset"),
        (["train"], {}, "train"),
        (["train"], [], "no clients"),
        (["train", 0], 5, "client 0"),
        (["train", 0], [], "client 0 has no training samples"),
        (["train", 0, 0], 600, "0..599"),
        (["train", 0, 0], -1, "0..599"),
        (["train", 0, 0], 10**30, "0..599"),
        (["train", 0, 0], 1.0, "client 0"),
        (["train", 0, 0], True, "client 0"),
        (["train", 0, 0], [1], "client 0"),
        (["test"], [], "hold-out"),
        (["test", 3], None, "client 3"),
    ],
)
def test_edited_files_are_refused_with_a_reason(tmp_path, keys, value, message):
    path = tmp_path / "split.json"
    make().save(path)
    content = json.loads(path.read_text())
    edit(content, *keys, value=value)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=re.escape(message)):
        load_partition(path, DATASET)


@pytest.mark.parametrize("where", ["train", "test"])
def test_a_sample_used_twice_is_named(tmp_path, where):
    path = tmp_path / "split.json"
    make().save(path)
    content = json.loads(path.read_text())
    content[where][0].append(content["train"][1][0])
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"sample {content['train'][1][0]} is used more than once"):
        load_partition(path, DATASET)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"format": NaN}',
        b'{"format": ' + b"9" * 10_000 + b"}",
        b'{"format": "fedcore-partition-1"}',
    ],
)
def test_strange_files_are_refused_without_a_crash(tmp_path, content):
    path = tmp_path / "split.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path))):
        load_partition(path, DATASET)


def test_missing_and_unreadable_files(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(DataError, match="cannot read"):
            load_partition(path, DATASET)


def test_numbers_that_cannot_work():
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="client_test_fraction"):
            make(client_test_fraction=fraction)
    with pytest.raises(ConfigError, match="clients"):
        make(clients=0)


def overlapping(labels, num_clients, **_):
    return [np.array([0, 1])] * num_clients


def too_few(labels, num_clients, **_):
    return [np.arange(len(labels))]


def outside(labels, num_clients, **_):
    return [np.array([len(labels) + i]) for i in range(num_clients)]


@pytest.mark.parametrize("partitioner", [overlapping, too_few, outside])
def test_a_partitioner_that_breaks_its_contract(monkeypatch, partitioner):
    monkeypatch.setattr("fedcore.data.partitioners.resolve", lambda kind, name: partitioner)
    with pytest.raises(PluginContractError, match="invalid partition"):
        make(partitioner="mine")


def rendered(partition, dataset=DATASET, **options):
    out = io.StringIO()
    table = draw_table(partition, dataset.train.labels, dataset.num_classes)
    Console(file=out, width=400, **options).print(table)
    return out.getvalue()


def test_table_holds_every_count_and_the_sums():
    partition = make()
    lines = rendered(partition).splitlines()
    rows = {cells[0]: cells[1:] for line in lines if len(cells := re.findall(r"[^\s│┃]+", line)) > 5}
    counts = partition.class_counts(DATASET.train.labels, 10)
    for client, row in enumerate(counts.tolist()):
        train, held_out = len(partition.train[client]), len(partition.test[client])
        shown = [str(n) for n in row if n] + [str(sum(n > 0 for n in row)), str(train), str(held_out)]
        assert rows[str(client)] == shown
    assert rows["total"][:10] == [str(n) for n in counts.sum(dim=0).tolist()]
    assert rows["total"][-3:] == ["10", str(int(counts.sum())), str(600 - int(counts.sum()))]
    assert partition.sha256 in rendered(partition)
    assert "\x1b[" in rendered(partition, force_terminal=True, color_system="truecolor")


def test_table_of_many_clients_and_classes_stays_small():
    dataset = make_dataset(5000, classes=100)
    text = rendered(make(dataset, partitioner="iid", clients=100), dataset)
    clients = [int(line.split()[1]) for line in text.splitlines() if re.match(r"│ \d+ ", line)]
    assert clients == [*range(20), *range(95, 100)]
    assert "96-99" in text
    assert "…" in text


def test_names_in_a_file_are_not_markup(tmp_path):
    partition = make()
    partition.info["dataset"] = "[/red] [bold]x"
    partition.save(tmp_path / "split.json")
    assert "[/red] [bold]x" in rendered(load_partition(tmp_path / "split.json", DATASET))


def test_a_damaged_byte_is_always_noticed(tmp_path):
    path = tmp_path / "split.json"
    partition = make(make_dataset(40), clients=3)
    partition.save(path)
    content = path.read_bytes()
    start = content.index(b'"train"')
    rng = np.random.default_rng(0)
    for position in rng.integers(start, len(content) - 1, 200):
        damaged = bytearray(content)
        damaged[position] = rng.integers(33, 127)
        path.write_bytes(damaged)
        try:
            assert load_partition(path, make_dataset(40)).sha256 == partition.sha256
        except FedcoreError:
            continue
