"""Many clients' positions in two tensors: as a list of tensors, in a file beside the JSON, and shared."""

import json
import re
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcore.data.partition as partition_module
from fedcore.base.errors import ConfigError, DataError, PluginContractError
from fedcore.base.serial import read_tensors, write_tensors
from fedcore.data import IndexLists, Partition, load_partition
from tests.data.labelled import DATASET, partitioned
from tests.sentences import raises

KINDS = (list, lambda part: np.array(part, dtype=np.int64), lambda part: torch.tensor(part, dtype=torch.int64))
LISTS = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=6), max_size=8)


def deal(partitioner="dirichlet", clients=10, **changes):
    """Partition with nothing held out."""
    return partitioned(partition=partitioner, clients=clients, **{"client_test_fraction": 0.0, **changes})


def lists_of(parts):
    """Return the positions as lists of Python's integers."""
    return [part.tolist() for part in parts]


@given(LISTS, st.sampled_from(KINDS))
def test_parts_are_as_a_list_of_tensors(lists, kind):
    tensors = [torch.tensor(part, dtype=torch.int64) for part in lists]
    parts = IndexLists.of([kind(part) for part in lists])
    assert len(parts) == len(tensors)
    assert lists_of(parts) == lists
    assert all(part.dtype == torch.int64 for part in parts)
    for k in range(-len(tensors), len(tensors)):
        assert torch.equal(parts[k], tensors[k])
    for wrong in (len(tensors), -len(tensors) - 1):
        with pytest.raises(IndexError):
            parts[wrong]
    assert parts.sizes.tolist() == [len(part) for part in lists] == [parts.size(k) for k in range(len(lists))]
    assert parts.offsets.tolist() == [0, *accumulate(map(len, lists))]
    assert IndexLists.of(parts) is parts
    assert lists_of(IndexLists.of(np.array([[0, 1], [2, 3]], dtype=object))) == [[0, 1], [2, 3]]
    assert lists_of(IndexLists.of([np.array([4.0, 5.0])])) == [[4, 5]]


def test_positions_take_four_bytes_where_they_fit():
    assert IndexLists.of([[0, 2**31 - 1], [-(2**31)]]).positions.dtype == torch.int32
    assert IndexLists.of([[2**31]]).positions.dtype == IndexLists.of([[-(2**31) - 1]]).positions.dtype == torch.int64


def test_what_is_given_out_is_not_the_partitions_own():
    parts = IndexLists.of([[1, 2], [3]])
    parts[0].zero_()
    next(iter(parts)).zero_()
    assert lists_of(parts) == [[1, 2], [3]]


def test_the_hash_and_the_file_are_those_of_format_1(tmp_path):
    """Written with lists of tensors, by fedcore 0.1; a hash must not depend on how positions are kept."""
    none = torch.tensor([], dtype=torch.int64)
    partition = Partition([torch.tensor([2, 0]), torch.tensor([1])], [none, torch.tensor([3])], {"seed": 1})
    sha256 = "a476360023f8900579c6b250cc3712f69f32c4fae7cde2fadb7d6cd316110409"
    partition.save(tmp_path / "split.json")
    assert partition.sha256 == sha256
    assert (tmp_path / "split.json").read_text() == (
        f'{{"format": "fedcore-partition-1", "sha256": "{sha256}", "info": {{"seed": 1}}, '
        '"train": [[2, 0], [1]], "test": [[], [3]]}\n'
    )


@pytest.fixture
def split(tmp_path, monkeypatch):
    """A partition whose positions stand in a file beside the JSON."""
    monkeypatch.setattr(partition_module, "MAX_IN_JSON", 599)
    partition = deal(client_test_fraction=0.25)
    partition.save(tmp_path / "split.json")
    return partition, tmp_path / "split.json", next(tmp_path.glob("*.safetensors"))


def test_very_many_positions_stand_in_a_file_beside(split):
    partition, path, beside = split
    content = json.loads(path.read_text())
    assert content["file"] == beside.name == f"split-{partition.sha256[:16]}.safetensors"
    assert (content["clients"], content["info"], "train" in content) == (10, partition.info, False)
    again = load_partition(path, DATASET)
    assert again.sha256 == partition.sha256 == deal(client_test_fraction=0.25).sha256
    assert (lists_of(again.train), lists_of(again.test)) == (lists_of(partition.train), lists_of(partition.test))


def test_a_new_split_leaves_what_the_old_file_names(split, monkeypatch):
    partition, path, _ = split

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(partition_module, "write_text", fail)
    with raises(DataError):
        deal(seed=9).save(path)
    assert load_partition(path, DATASET).sha256 == partition.sha256


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("train/positions", torch.arange(3), ("0", "3")),
        ("train/positions", torch.zeros(2, 2, dtype=torch.int64), ("0", "2")),
        ("train/positions", torch.ones(5), ("0", "5")),
        ("train/offsets", torch.tensor([1, 0]), ("0",)),
        ("train/offsets", torch.tensor([], dtype=torch.int64), ()),
        ("test/offsets", "falling", ()),
        ("train/positions", -1, ("0",)),
        ("train/positions", 600, ("0",)),
        ("train/positions", "twice", ()),
        ("train/positions", "swapped", ()),
        ("test/offsets", "fewer", ("9",)),
        ("test/positions", None, ()),
    ],
)
def test_a_damaged_file_beside_is_refused_with_a_reason(split, name, value, named):
    _, path, beside = split
    tensors = {key: tensor.clone() for key, tensor in read_tensors(beside)[0].items()}
    if value is None:
        del tensors[name]
    elif isinstance(value, torch.Tensor):
        tensors[name] = value
    elif isinstance(value, int):
        tensors[name][0] = value
    elif value == "twice":
        tensors[name][0] = tensors[name][1]
    elif value == "swapped":
        tensors[name][:2] = tensors[name][:2].flip(0)
    elif value == "falling":
        tensors[name][1] = tensors[name][-1] + 1
    else:
        tensors[name] = torch.cat([tensors[name][:-2], tensors[name][-1:]])
    write_tensors(beside, tensors)
    with raises(DataError, *named):
        load_partition(path, DATASET)


@pytest.mark.parametrize("content", [b"", b"text" * 40, "missing"])
def test_a_file_beside_that_is_none_or_missing(split, content):
    _, path, beside = split
    beside.unlink()
    if content != "missing":
        beside.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(beside.name)):
        load_partition(path, DATASET)


@pytest.mark.parametrize("name", ["../split.safetensors", "/etc/passwd", "split.json", 3, None])
def test_only_a_file_in_the_same_folder_is_read(split, name):
    _, path, _ = split
    path.write_text(json.dumps({**json.loads(path.read_text()), "file": name}))
    with raises(DataError):
        load_partition(path, DATASET)


def test_samples_are_not_shared_where_nobody_says_so():
    assert "shares_samples" not in deal().info


class Sharing:
    shares_samples = True

    def __call__(self, labels, num_clients, **_):
        return [np.array([k, k + 1]) for k in range(num_clients)]


@pytest.fixture
def sharing(monkeypatch):
    partitioner = Sharing()
    monkeypatch.setattr("fedcore.data.assign.resolve", lambda kind, name: partitioner)
    return partitioner


def test_a_partitioner_may_declare_that_clients_share_samples(tmp_path, sharing):
    partition = deal("mine", 4)
    partition.save(tmp_path / "split.json")
    again = load_partition(tmp_path / "split.json", DATASET)
    assert lists_of(again.train) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert again.info["shares_samples"] is True


def test_what_others_train_on_is_not_held_out(tmp_path, sharing):
    with raises(ConfigError, "0"):
        deal("mine", 4, client_test_fraction=0.5)
    partition = deal("mine", 4)
    Partition(list(partition.train)[:2], IndexLists.of([[5], []]), partition.info).save(tmp_path / "split.json")
    with raises(DataError):
        load_partition(tmp_path / "split.json", DATASET)


def test_a_sharing_partitioner_keeps_the_rest_of_the_contract(sharing):
    with raises(PluginContractError):
        deal("mine", 600)
