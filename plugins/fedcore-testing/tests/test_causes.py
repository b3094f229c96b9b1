"""An error that stops many checks is told once."""

from __future__ import annotations

import re

import pytest

from fedcore import Loss, Plugin, hookimpl
from fedcore_testing import CheckFailed, check_plugin, run_checks
from fedcore_testing.causes import cause_of


class Raises(Plugin):
    """Fails wherever a client trains."""

    @hookimpl
    def begin_local(self, client):
        raise KeyError("previous")


class Divides(Plugin):
    """Fails on the server."""

    @hookimpl
    def server_step(self, mean):
        return 1 / 0


class KeepsACount(Plugin):
    """Changes its object where a client trains."""

    seen = 0

    @hookimpl
    def local_loss(self, step):
        self.seen += 1


class GivesNan(Plugin):
    """Diverges."""

    @hookimpl
    def local_loss(self, step):
        return Loss(step.logits.mean() * float("nan"))


class RaisesWithOneClient(Plugin):
    """Fails in two checks by one error, and in others by another."""

    @hookimpl
    def server_step(self, server):
        if server.num_clients == 1:
            raise IndexError("nobody to pair with")
        if len(server.accepted) == 1:
            raise IndexError("nobody else came")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plugin", [Raises, Divides, KeepsACount, GivesNan])
def test_one_error_is_told_once(plugin):
    with pytest.raises(CheckFailed) as caught:
        check_plugin(plugin, slow=False)
    text = str(caught.value)
    told = re.findall(r"fails (check_\w+): ", text)
    assert told[0] == "check_trains"
    assert len(told) <= 2  # what gives nan breaks a rule for terms, too
    others = re.search(r"^The same error fails (.*)\.$", text, re.MULTILINE)[1].split(", ")
    assert len(others) >= 12
    assert {"check_trains_with_batch_norm", "check_works_with_one_client"} <= {*others}


def test_an_error_with_a_hint_needs_no_other_remedy():
    with pytest.raises(CheckFailed, match="Hint: keep values in") as caught:
        check_plugin(KeepsACount, slow=False)
    assert "What to do" not in str(caught.value)


def test_other_errors_are_told_beside_it():
    verdicts = [v for v in run_checks(RaisesWithOneClient, slow=False) if v.status == "failed"]
    assert {(v.check.name, v.same_as) for v in verdicts} == {
        ("check_works_with_one_client", ""),
        ("check_works_with_partial_participation", ""),
    }


def test_a_check_that_is_expected_to_fail_does_not_stand_for_others():
    reasons = {"check_trains": "a test"}
    only = ["check_trains", "check_works_with_one_client"]
    verdicts = list(run_checks(Raises, only=only, expected_failed_checks=reasons))
    assert [(v.status, v.same_as) for v in verdicts] == [("failed as expected", ""), ("failed", "")]
    assert "raised KeyError: 'previous'" in verdicts[1].message


def test_causes():
    one = "round 1: client 0 raised: plugin 'x' hook end_local (round 1, client 0) raised ValueError: 3 of 4"
    other = (
        "round 0: 0 of 2 clients gave a usable update, --min-clients asks for 1. clients 5, 6: raised, plugin 'x' "
        "hook end_local (round 0) raised ValueError: 1 of 2; client 7: dropped, was lost."
    )
    assert cause_of(AssertionError(one)) == cause_of(AssertionError(other)) == "end_local raised ValueError: # of #"
    assert cause_of(AssertionError("client 0 diverged: loss 'a' became nan")) == "diverged loss 'a' became nan"
    sets = "plugin 'x' (round {}, client {}) sets self.n. Hint: keep it in client.state"
    assert cause_of(AssertionError(sets.format(1, 0))) == "sets self.n. Hint: keep it in client.state"
    assert cause_of(AssertionError(sets.format(1, 0))) == cause_of(AssertionError(sets.format(2, 3)))
    assert cause_of(AssertionError("the model differs")) == ""
