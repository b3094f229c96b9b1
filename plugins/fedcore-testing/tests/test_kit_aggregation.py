"""The conformance kit on faults that the global model alone does not show: in states, later rounds and single messages.

Every faulty plugin trains; what is wrong with it stands in its docstring.
"""

from __future__ import annotations

import pytest
import torch

from fedcore import Exchange, Loss, Plugin, hookimpl
from fedcore_testing import CHECKS, CheckFailed, NotApplicable
from tests.sentences import raises


def check(name, plugin):
    CHECKS[f"check_{name}"].function(plugin)


def mean_features(client):
    """Return the mean feature of each class, zeros for absent ones: (num_classes, feature_dim)."""
    features, _, labels = client.forward()
    hot = torch.nn.functional.one_hot(labels, client.num_classes).to(features.dtype)
    return hot.T @ features / hot.sum(dim=0).clamp(min=1).unsqueeze(1)


class Personal(Plugin):
    """Nothing of the model travels; clients send a centre of their features."""

    @hookimpl
    def personal_parameters(self):
        return ["*"]

    @hookimpl
    def end_local(self, client):
        return {"centre": client.forward()[0].mean(dim=0)}


class KeepsTheLast(Personal):
    """The centre of the update that comes last wins."""

    @hookimpl
    def accumulate(self, server, update):
        server.state["centre"] = update.payload["centre"]


class ListsThem(Personal):
    """A JSON value instead of a tensor."""

    @hookimpl
    def accumulate(self, server, update):
        server.state["norms"] = [*server.state.get("norms", []), float(update.payload["centre"].norm())]


class KeepsThemByPlace(Personal):
    """The place of a client in this round's cohort instead of its id: another client has it in the next round."""

    @hookimpl
    def accumulate(self, server, update):
        server.state[f"centre {server.cohort.index(update.client)}"] = update.payload["centre"]


class AddsThemUp(Personal):
    """Done well."""

    @hookimpl
    def accumulate(self, server, update):
        server.state.add("centre", update.payload["centre"])
        server.state[f"of client {update.client}"] = update.payload["centre"]


class WeightsById(Plugin):
    """Done well: who the client is decides, not when it comes."""

    @hookimpl
    def weight(self, update):
        return 1.0 + update.client


class GivesTheFirstsClassifier(Plugin):
    """All go on with the classifier of the client that pauses first."""

    exchanges = Exchange(("classifier.*",), lambda epochs: {1})

    @hookimpl
    def mid_local_epoch(self, snapshots):
        return dict.fromkeys(snapshots, next(iter(snapshots.values())))


@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        (KeepsTheLast, "server.state['keepsthelast']['centre']"),
        (ListsThem, "server.state['liststhem']['norms'][0]"),
        (KeepsThemByPlace, "server.state['keepsthembyplace']['centre 0']"),
        (GivesTheFirstsClassifier, "the model"),
    ],
)
def test_what_the_server_keeps_may_not_depend_on_the_order_either(plugin, named):
    with raises(CheckFailed, named):
        check("order_of_clients_does_not_matter", plugin)


@pytest.mark.filterwarnings("error:each client's own model:RuntimeWarning")
def test_sums_and_values_by_client_do_not_depend_on_the_order():
    check("order_of_clients_does_not_matter", AddsThemUp)
    check("order_of_clients_does_not_matter", WeightsById)


def test_comparisons_that_would_compare_nothing_are_not_passed():
    with raises(NotApplicable):
        check("order_of_clients_does_not_matter", Personal)
    with raises(NotApplicable):
        check("mean_of_equal_updates_is_that_update", Personal)


class WeightsByItsNeighbour(Personal):
    """Looks at its neighbour's notes, which come into its own state only."""

    @hookimpl
    def end_local(self, client):
        others = [notes for plugin, notes in client._session.scratch.items() if plugin != self.name and notes]
        client.state["alone"] = not others
        return {}


def test_states_are_compared_beside_another_plugin():
    with raises(CheckFailed):
        check("runs_beside_another_plugin", WeightsByItsNeighbour)


class CountsInTheState(Plugin):
    """A second pass over a step counts it twice; the count changes no weight."""

    @hookimpl
    def local_loss(self, step):
        step.client.state["passes"] = step.client.state.get("passes", 0) + 1
        return Loss(step.features.square().mean(), weight=0.01)


def test_a_second_pass_may_not_change_the_clients_state():
    with raises(CheckFailed):
        check("a_second_pass_changes_nothing", CountsInTheState)


class AveragesZerosForEach(Plugin):
    """Absent classes count as zeros, and every client gets a message of its own."""

    @hookimpl
    def end_local(self, client):
        return {"means": mean_features(client)}

    @hookimpl
    def accumulate(self, server, update):
        means = update.payload["means"]
        server.state.add("sum", means)
        server.state.add("held", (means != 0).any(dim=1).to(means.dtype))

    def divisor(self, server):
        return server.num_clients

    @hookimpl
    def broadcast_to(self, server, client):
        if "sum" not in server.state:
            return None
        return {"prototypes": (server.state["sum"] / self.divisor(server)).float()}


class AveragesHoldersForEach(AveragesZerosForEach):
    """Done well."""

    def divisor(self, server):
        return server.state["held"].clamp(min=1).unsqueeze(1)


def test_messages_to_single_clients_are_looked_at_for_absent_classes():
    with raises(CheckFailed):
        check("absent_classes_are_not_averaged_as_zeros", AveragesZerosForEach)
    check("absent_classes_are_not_averaged_as_zeros", AveragesHoldersForEach)


class Diverges(AveragesZerosForEach):
    """One client's loss becomes nan."""

    @hookimpl
    def local_loss(self, step):
        return Loss(step.logits.mean() * (float("nan") if step.client.id == 1 else 1.0))


def test_a_client_that_fails_is_said_where_its_update_is_missed():
    with raises(CheckFailed, "1") as caught:
        check("absent_classes_are_not_averaged_as_zeros", Diverges)
    assert "KeyError" not in str(caught.value)


class UndeclaredMomentum(Plugin):
    """Adds the last step from the second round on, without ``server_optimizer``."""

    @hookimpl
    def server_step(self, server, mean):
        taken = {}
        for name, tensor in mean.items():
            step = tensor - server.model[name]
            taken[name] = server.model[name] + step + 0.9 * server.state.get(name, torch.zeros(()))
            server.state[name] = step
        return taken


def test_the_servers_state_acts_from_the_second_round_on():
    with raises(CheckFailed):
        check("mean_of_equal_updates_is_that_update", UndeclaredMomentum)


class LooksOn(Plugin):
    """Diverges, and edits nothing."""

    @hookimpl
    def observe(self, step):
        step.client.scratch["seen"] = step.y

    @hookimpl
    def local_loss(self, step):
        return Loss(step.logits.sum() * float("nan"))


def test_values_that_are_not_a_number_are_not_taken_for_edits():
    with raises(NotApplicable):
        check("edits_nothing_in_place", LooksOn)


class KeepsItsClientOnItself(Plugin):
    """Finds its client where the client that began last is, when several train at the same time."""

    def __init__(self, options):
        super().__init__(options)
        self.notes = {}

    @hookimpl
    def begin_local(self, client):
        self.notes["weight"] = 1.0 + client.id

    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean(), weight=self.notes["weight"])


class Branches(Plugin):
    @hookimpl
    def local_loss(self, step):
        return Loss(step.features.square().mean()) if step.logits.sum() > 0 else None


def test_clients_that_train_as_one_keep_to_themselves():
    with raises(CheckFailed):
        check("the_same_as_one_by_one", KeepsItsClientOnItself)
    with pytest.raises(NotApplicable, match=r"data-dependent control flow"):
        check("the_same_as_one_by_one", Branches)


class Amplifies(Plugin):
    """Makes much of a last bit."""

    @hookimpl
    def local_loss(self, step):
        return Loss((step.features * 1e5).sin().mean())


def test_rounding_that_a_method_amplifies_is_rounding():
    check("the_same_as_one_by_one", Amplifies)
