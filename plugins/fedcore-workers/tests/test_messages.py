"""Every message comes back as it was packed, through the bytes that engines send."""

from dataclasses import replace

import pytest
import torch

from fedcore import ClientUpdate, FedcoreError, PluginContractError
from fedcore.engines import ClientFailure, ClientTask, Evaluation, Pause, Reply, SharedPayload, dumps, loads
from fedcore.models import Placement
from fedcore.tools import StorageError
from fedcore_workers import (
    pack_error,
    pack_outcome,
    pack_outcomes,
    pack_shared,
    pack_task,
    pack_tasks,
    unpack_error,
    unpack_outcome,
    unpack_outcomes,
    unpack_shared,
    unpack_task,
    unpack_tasks,
)

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
        version=7,
        seconds=0.5,
        plugin_seconds={"moon": 0.25},
    )


def test_a_task():
    task = ClientTask("round-1-fit-3", "fit_begin", 3, 1, "s", 0, "round-1", {"encoder.weight": W}, {"steps": 5})
    again = unpack_task(*sent(*pack_task(task)))
    assert_equal(task.tensors, again.tensors)
    assert {**vars(task), "tensors": 0} == {**vars(again), "tensors": 0}


def test_the_tasks_of_a_message():
    one = ClientTask("round-1-fit-3", "fit_begin", 3, 1, "s", 0, "round-1", {}, {"steps": 5})
    tasks = [one, replace(one, id="round-1-fit-7", client=7, session=None, version=None, meta={"steps": 5})]
    for some in (tasks, tasks[:1], [replace(one, tensors={"encoder.weight": W})]):
        again = unpack_tasks(*sent(*pack_tasks(some)))
        assert [{**vars(task), "tensors": 0} for task in again] == [{**vars(task), "tensors": 0} for task in some]
        assert_equal(again[0].tensors, some[0].tensors)


@pytest.mark.parametrize("kind", [Reply, lambda tensors: Pause(2, tensors)], ids=["reply", "pause"])
def test_a_reply_and_a_pause(kind):
    given = kind({"a/b": W})
    again = unpack_outcome(*sent(*pack_outcome(given)))
    assert type(again) is type(given)
    assert_equal(again.tensors, {"a/b": W})
    assert {**vars(given), "tensors": 0} == {**vars(again), "tensors": 0}
    assert unpack_outcome(*sent(*pack_outcome(kind({})))) == kind({})


def test_an_evaluation():
    given = Evaluation({"personal/counts/total": B}, "no")
    again = unpack_outcome(*sent(*pack_outcome(given)))
    assert_equal(given.tensors, again.tensors)
    assert again.failed == "no"


def test_an_outcome_without_tensors():
    given = ClientFailure("timeout", "no answer")
    assert unpack_outcome(*sent(*pack_outcome(given))) == given


def rows_of_one_matrix():
    weights = torch.arange(12.0).reshape(2, 2, 3).unbind()
    return [
        replace(update(), client=k, model={"w": weight}, metrics={"losses": {"task": k / 3}})
        for k, weight in enumerate(weights)
    ]


@pytest.mark.parametrize(
    "given",
    [
        rows_of_one_matrix(),
        [update(), update(moon={"sums": B})],
        [update(), replace(update(), model={"encoder.weight": W[:1]})],
        [Reply({"a": W}), ClientFailure("timeout", "no answer")],
        [Reply({}), Reply({})],
        [ClientFailure("raised", "no"), ClientFailure("diverged", "nan")],
        [update()],
    ],
    ids=["rows", "payloads", "shapes", "kinds", "nothing", "failures", "one"],
)
def test_the_outcomes_of_a_message(given):
    again = unpack_outcomes(*sent(*pack_outcomes(given)))
    assert [pack_outcome(each)[1] for each in again] == [pack_outcome(each)[1] for each in given]
    for one, other in zip(again, given, strict=True):
        assert_equal(pack_outcome(one)[0], pack_outcome(other)[0])


def test_updates_of_a_message_keep_the_types_of_their_values_and_share_nothing_that_can_change():
    given = [replace(update(), client=k, samples=samples) for k, samples in enumerate([1, True, 1.0])]
    again = unpack_outcomes(*sent(*pack_outcomes(given)))
    assert [type(each.samples) for each in again] == [int, bool, float]
    for name in ("metrics", "plugin_seconds", "payload"):
        assert len({id(getattr(each, name)) for each in again}) == 3, name


def test_rows_of_one_matrix_are_sent_without_a_copy():
    given = rows_of_one_matrix()
    (matrix,) = pack_outcomes(given)[0].values()
    assert matrix.data_ptr() == given[0].model["w"].data_ptr()
    (copied,) = pack_outcomes(given[::-1])[0].values()  # in another order they are no matrix
    assert torch.equal(copied[0], given[1].model["w"])


def test_an_update_with_tensors_whose_names_hold_the_separator():
    given = update(fedproc={"sums/by class": B, "counts": W})
    again = unpack_outcome(*sent(*pack_outcome(given)))
    assert_equal(given.model, again.model)
    assert set(again.payload) == {"fedproc"}
    assert_equal(given.payload["fedproc"], again.payload["fedproc"])
    assert vars(given) | {"model": 0, "payload": 0} == vars(again) | {"model": 0, "payload": 0}


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({"optimizer/m": W}, {}),
        ({"samples/m": W}, {}),
        ({}, {"samples": None}),
        ({}, {"more": 1}),
        ({}, {"payload": {"moon": 3}}),
        ({}, {"frozen": 3}),
        ({}, {"frozen": [[]]}),
        ({}, {"outcome": "Pair"}),
        ({}, {"outcome": []}),
        ({}, {"outcome": None}),
    ],
)
def test_what_is_no_outcome_is_refused(tensors, meta):
    """A name that is unknown, missing or there twice; the values are checked by the server."""
    given, said = pack_outcome(update())
    said = {name: value for name, value in {**said, **meta}.items() if value is not None}
    with pytest.raises(ValueError, match="not an outcome of a task"):
        unpack_outcome({**given, **tensors}, said)


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
    given = SharedPayload({"encoder.weight": W}, {"fedproc": {"p/q": B}}, 0.05, "digest")
    again = unpack_shared(*sent(*pack_shared(given)))
    for shared in (again, again.copy_to(CPU)):
        assert_equal(shared.model, {"encoder.weight": W})
        assert set(shared.received) == {"fedproc"}
        assert_equal(shared.received["fedproc"], {"p/q": B})
        assert (shared.lr, shared.fixed) == (0.05, "digest")
    assert given.copy_to(CPU).model["encoder.weight"].data_ptr() != W.data_ptr()
