"""Every message comes back as it was packed, through the bytes that engines send."""

import pytest
import torch

from fedcore import ClientUpdate, PluginContractError
from fedcore.base.errors import FedcoreError, StorageError
from fedcore.base.serial import dumps, loads
from fedcore.client.messages import (
    ClientFailure,
    ClientResult,
    ClientTask,
    SharedPayload,
    pack_error,
    pack_outcome,
    pack_shared,
    pack_task,
    pack_update,
    unpack_error,
    unpack_outcome,
    unpack_task,
    unpack_update,
)
from fedcore.models.placement import Placement

W, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
CPU = Placement(torch.device("cpu"), torch.contiguous_format)


def sent(tensors, meta):
    return loads(dumps(tensors, meta))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def update(**payload):
    return ClientUpdate(
        client=3,
        model={"encoder.weight": W, "classifier.bias": B},
        samples=20,
        steps=4,
        lr=0.1,
        momentum=0.9,
        payload=payload,
        metrics={"losses": {"task": 1.5}},
        frozen=frozenset({"encoder.weight"}),
    )


def test_a_task():
    task = ClientTask("round-1-fit-3", "fit_begin", 3, 1, "s", 0, "round-1", {"encoder.weight": W}, {"steps": 5})
    again = unpack_task(*sent(*pack_task(task)))
    assert_equal(task.tensors, again.tensors)
    assert {**vars(task), "tensors": 0} == {**vars(again), "tensors": 0}


def test_a_result_and_a_failure():
    kind, tensors, meta = pack_outcome(ClientResult("t", {"a/b": W}, {"paused": 2}))
    again = unpack_outcome(kind, *sent(tensors, meta))
    assert_equal(again.tensors, {"a/b": W})
    assert (again.task_id, again.meta) == ("t", {"paused": 2})
    failure = ClientFailure("t", "timeout", "no answer")
    kind, tensors, meta = pack_outcome(failure)
    assert unpack_outcome(kind, *sent(tensors, meta)) == failure


def test_an_update_with_tensors_whose_names_hold_the_separator():
    given = update(moon={}, fedproc={"sums/by class": B, "counts": W})
    tensors, meta = sent(*pack_update(given, 7))
    again = unpack_update(tensors, meta)
    assert meta["version"] == 7
    assert_equal(given.model, again.model)
    assert set(again.payload) == {"fedproc"}, "a plugin without tensors sends nothing"
    assert_equal(given.payload["fedproc"], again.payload["fedproc"])
    assert vars(given) | {"model": 0, "payload": 0} == vars(again) | {"model": 0, "payload": 0}


def test_an_update_s_payload_holds_tensors_only():
    with pytest.raises(PluginContractError, match=r"plugin 'dp' puts 'noise' into its payload, expected a tensor"):
        pack_update(update(dp={"noise": 0.5}), None)


def test_an_update_with_other_tensors_is_refused():
    tensors, meta = pack_update(update(), None)
    with pytest.raises(ValueError, match="under 'optimizer'"):
        unpack_update({**tensors, "optimizer/m": W}, meta)


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (PluginContractError.of("moon", "returned 3", hook="local_loss"), PluginContractError),
        (StorageError("no room"), StorageError),
        (FedcoreError("other"), PluginContractError),
    ],
)
def test_an_error(error, cls):
    again = unpack_error(sent({}, pack_error(error))[1])
    assert (type(again), str(again)) == (cls, str(error))
    assert getattr(again, "plugin", None) == getattr(error, "plugin", None)


def test_a_shared_payload():
    shared = SharedPayload(*sent(*pack_shared({"encoder.weight": W}, {"fedproc": {"p/q": B}, "dp": {}}, 0.05)), CPU)
    assert_equal(shared.model, {"encoder.weight": W})
    assert set(shared.received) == {"fedproc"}
    assert_equal(shared.received["fedproc"], {"p/q": B})
    assert shared.lr == 0.05
