"""Every hook: called in the order of the call tree in hookspecs.py, on its side, as often as it says."""

from __future__ import annotations

import pytest
import torch

from fedcore import Exchange, Plugin, hookimpl, question
from fedcore.hooks.checks import HOOKS
from tests import support
from tests.support import run_toy

CALLS: list[tuple] = []


class Everything(Plugin):
    """Implements every hook and notes each call."""

    exchanges = Exchange(("encoder.*",), lambda epochs: {1})
    owns = ("encoder.*",)

    def note(self, hook, client=None, **details):
        CALLS.append((id(self), type(self).__name__, hook, client, details))

    @hookimpl
    def configure_model(self, model, task):
        self.note("configure_model", classes=task.num_classes)

    @hookimpl
    def personal_parameters(self, model):
        self.note("personal_parameters")

    @hookimpl
    def check_run(self, setup):
        self.note("check_run", clients=setup.config.clients, names=setup.layout.shared)

    @hookimpl
    def assign_samples(self, setup, partition):
        self.note("assign_samples", clients=setup.config.clients, sizes=partition.train.sizes.tolist())

    @hookimpl
    def select_clients(self, server):
        self.note("select_clients", round=server.round)

    @hookimpl
    def begin_round(self, server):
        self.note("begin_round", cohort=list(server.cohort), num=server.num_clients, lr=server.lr)
        assert [answer.client for answer in server.ask("all", self.asked, tensors={"x": torch.ones(1)})] == [0, 1]

    @question
    def asked(self, client, tensors):
        self.note("asked", client.id, tensors=sorted(tensors))
        return {"y": tensors["x"] + client.id}

    @hookimpl
    def pre_answer(self, client, answer):
        self.note("pre_answer", client.id, answer=answer["y"].tolist())

    @hookimpl
    def broadcast(self, server):
        self.note("broadcast", round=server.round)
        return {"sent": torch.ones(1)}

    @hookimpl
    def local_samples(self, client, samples):
        self.note("local_samples", client.id, n=len(samples))

    @hookimpl
    def begin_local(self, client):
        self.note("begin_local", client.id, received=sorted(client.received), steps=client.steps)

    @hookimpl
    def task_loss(self, step):
        self.note("task_loss", step.client.id, epoch=step.epoch)
        return (step.logits - step.x.flatten(1)).pow(2).mean()

    @hookimpl
    def local_loss(self, step):
        self.note("local_loss", step.client.id, epoch=step.epoch)

    @hookimpl
    def gradients(self, step, gradients):
        self.note("gradients", step.client.id, names=sorted(gradients), grad_enabled=torch.is_grad_enabled())

    @hookimpl
    def observe(self, step):
        parameter = step.parameters[0]
        self.note(
            "observe",
            step.client.id,
            epoch=step.epoch,
            gradient=parameter.grad is not None,
            grad_enabled=torch.is_grad_enabled(),
            steps=step.client.steps,
        )

    @hookimpl
    def mid_local_epoch(self, server, epoch, snapshots):
        self.note("mid_local_epoch", epoch=epoch, clients=sorted(snapshots), names=sorted(snapshots[0]))

    @hookimpl
    def end_local(self, client):
        self.note("end_local", client.id, steps=client.steps)
        return {"up": torch.full((1,), float(client.id))}

    @hookimpl
    def pre_upload(self, client, update):
        self.note("pre_upload", client.id, payload=sorted(update.payload))
        return update

    @hookimpl
    def guard_upload(self, client, update):
        self.note("guard_upload", client.id, payload=sorted(update.payload))

    @hookimpl
    def all_updates(self, server, updates):
        self.note("all_updates", clients=[update.client for update in updates], payload=sorted(updates[0].payload))

    @hookimpl
    def pre_aggregate(self, server, update):
        self.note("pre_aggregate", update.client, payload=sorted(update.payload))

    @hookimpl
    def weight(self, server, update):
        self.note("weight", update.client)

    @hookimpl
    def accumulate(self, server, update):
        self.note("accumulate", update.client, payload=sorted(update.payload))

    @hookimpl
    def aggregate(self, server, updates):
        self.note("aggregate", clients=[update.client for update in updates])

    @hookimpl
    def server_step(self, server, mean):
        self.note("server_step", accepted=list(server.accepted), names=sorted(mean))

    @hookimpl
    def broadcast_to(self, server, client):
        self.note("broadcast_to", client)
        return {"own": torch.ones(1)}

    @hookimpl
    def end_round(self, server):
        self.note("end_round", round=server.round)

    @hookimpl
    def personal_model(self, client):
        self.note("personal_model", client.id)

    @hookimpl
    def report(self, server):
        self.note("report", round=server.round)

    @hookimpl
    def post_train(self, server):
        self.note("post_train", round=server.round)


BUILD = ["configure_model", "personal_parameters", "check_run"]
STEP = ["task_loss", "local_loss", "gradients", "observe"]
# Client 1 has three samples and client 0 has one: the dispatch order is 1, 0.
CLIENT = [
    *[(hook, client) for client in (0, 1) for hook in ["local_samples", "asked", "pre_answer"]],
    *[(hook, client) for client in (1, 0) for hook in ["local_samples", "begin_local", *STEP]],
    *[(hook, client) for client in (1, 0) for hook in [*STEP, "end_local", "pre_upload", "guard_upload"]],
    *[(hook, client) for client in (0, 1) for hook in ["local_samples", "personal_model"]],
]
SERVER = [
    *[(hook, None) for hook in ["select_clients", "begin_round", "broadcast"]],
    *[("broadcast_to", client) for client in (1, 0)],
    ("mid_local_epoch", None),
    ("all_updates", None),
    *[(hook, client) for client in (1, 0) for hook in ["pre_aggregate", "weight", "accumulate"]],
    *[(hook, None) for hook in ["aggregate", "server_step", "end_round", "broadcast"]],
    *[("broadcast_to", client) for client in (0, 1)],
    ("report", None),
]
COVERED = {hook for hook, _ in CLIENT + SERVER} - {"asked"} | set(BUILD) | {"assign_samples", "post_train"}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Return the calls of two rounds: (side, hook, client, details)."""
    CALLS.clear()
    options = {"rounds": 2, "model": "module:fedcore_testing.base_and_head"}
    support.run(tmp_path_factory.mktemp("calls"), Everything, **{**support.TOY, **options})
    instances = list(dict.fromkeys(call[0] for call in CALLS))
    assert len(instances) == 2, "one instance of the plugin on the server and one on the clients"
    return [("server" if call[0] == instances[0] else "client", *call[2:]) for call in CALLS]


def of(calls, side, hooks=None):
    return [(hook, client) for where, hook, client, _ in calls if where == side and (hooks is None or hook in hooks)]


def details(calls, hook, client=None):
    return [what for _, name, number, what in calls if name == hook and number == client]


def test_every_hook_is_covered(calls):
    assert set(HOOKS) == COVERED, "a new hook needs its place in CLIENT or SERVER above"
    assert {hook for _, hook, _, _ in calls} == {*HOOKS, "asked"}


def in_the_order_of_the_tree(sequence):
    """Sort the two loss hooks of a step, whose order has a test of its own."""
    joined = ["loss" if hook in STEP[:2] else hook for hook, _ in sequence]
    return list(zip(joined, [client for _, client in sequence]))


def test_the_client_side(calls):
    once = in_the_order_of_the_tree([(hook, None) for hook in BUILD] + CLIENT + CLIENT)
    assert in_the_order_of_the_tree(of(calls, "client")) == once


def test_the_server_side(calls):
    expected = [(hook, None) for hook in [*BUILD, "assign_samples"]] + SERVER + SERVER
    assert of(calls, "server") == [*expected, ("post_train", None), ("report", None)]


def test_the_loss_hooks_of_a_step(calls):
    assert of(calls, "client", STEP[:2])[:2] == [("task_loss", 1), ("local_loss", 1)]


def test_answers_come_before_the_training_and_the_break_between_its_parts(calls):
    order = [(side, hook, client) for side, hook, client, _ in calls]
    first = order.index
    assert first(("server", "begin_round", None)) < first(("client", "asked", 0))
    assert first(("client", "asked", 1)) < first(("server", "broadcast", None))
    assert first(("server", "broadcast", None)) < first(("client", "begin_local", 1))
    assert first(("client", "observe", 0)) < first(("server", "mid_local_epoch", None))
    assert first(("server", "mid_local_epoch", None)) < first(("client", "end_local", 1))
    assert first(("client", "pre_upload", 1)) < first(("server", "pre_aggregate", 1))
    assert first(("server", "server_step", None)) < first(("client", "personal_model", 0))
    assert first(("client", "personal_model", 1)) < first(("server", "report", None))


def test_what_the_server_hooks_see(calls):
    assert details(calls, "select_clients") == [{"round": 0}, {"round": 1}]
    assert details(calls, "begin_round")[0] == {"cohort": [0, 1], "num": 2, "lr": 0.5}
    names = ["encoder.base.w"]
    assert details(calls, "mid_local_epoch")[0] == {"epoch": 1, "clients": [0, 1], "names": names}
    assert details(calls, "all_updates")[0] == {"clients": [1, 0], "payload": ["everything"]}
    assert details(calls, "aggregate")[0] == {"clients": [1, 0]}
    assert details(calls, "server_step")[0] == {"accepted": [1, 0], "names": ["classifier.h", *names]}
    assert details(calls, "post_train") == [{"round": 2}]


def test_what_the_client_hooks_see(calls):
    assert details(calls, "asked", 0)[0] == {"tensors": ["x"]}
    assert details(calls, "pre_answer", 1)[0] == {"answer": [2.0]}
    assert details(calls, "local_samples", 1)[0] == {"n": 3}
    assert details(calls, "begin_local", 0)[0] == {"received": ["own", "sent"], "steps": 0}
    assert details(calls, "task_loss", 0)[:2] == [{"epoch": 0}, {"epoch": 1}]
    assert details(calls, "observe", 0)[:2] == [
        {"epoch": epoch, "gradient": True, "grad_enabled": False, "steps": epoch} for epoch in (0, 1)
    ]
    assert details(calls, "end_local", 0)[0] == {"steps": 2}


def test_pre_upload_and_pre_aggregate_see_their_own_payload(calls):
    assert details(calls, "pre_upload", 0)[0] == {"payload": ["up"]}
    assert details(calls, "pre_aggregate", 0)[0] == {"payload": ["up"]}
    assert details(calls, "accumulate", 0)[0] == {"payload": ["up"]}


# --- two plugins -----------------------------------------------------------------------------------------


def _pair():
    shared = (
        "begin_round",
        "broadcast",
        "begin_local",
        "local_loss",
        "observe",
        "end_local",
        "pre_upload",
        "pre_aggregate",
        "accumulate",
        "end_round",
        "server_step",
        "post_train",
        "configure_model",
    )

    def recorder(hook):
        def body(self):
            CALLS.append((hook, type(self).__name__))

        return hookimpl(body)

    return [type(name, (Plugin,), {hook: recorder(hook) for hook in shared}) for name in ("Zeta", "Alpha")], shared


@pytest.mark.parametrize("reverse", [False, True])
def test_plugins_are_called_in_user_order(tmp_path, reverse):
    pair, shared = _pair()
    pair = pair[::-1] if reverse else pair
    CALLS.clear()
    run_toy(tmp_path, *pair, clients=1, local_epochs=1)
    order = [cls.__name__ for cls in pair]
    for hook in shared:
        called = [name for called_hook, name in CALLS if called_hook == hook]
        assert called, hook
        assert called == order * (len(called) // 2), hook
