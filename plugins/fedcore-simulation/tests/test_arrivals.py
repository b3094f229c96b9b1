"""Clients that do not wait for each other: order of arrival by hand, invariants, what is refused, and in a run."""

from __future__ import annotations

import numpy as np
import pytest

from fedcore import ConfigError, Exchange, Plugin, RunConfig, hookimpl
from fedcore_simulation.arrivals import Arrivals
from fedcore_testing import federations, partition_of
from fedcore_testing import records as lines
from tests.sentences import raises

go = federations()

SLOW = {"slow": 0.3, "slow_factor": 10, "latency": 5.0}


def arrivals(concurrency, cohort, clients=20, seconds=lambda step, client: 1.0, seed=0):
    config = RunConfig(clients=clients, participation=cohort / clients, seed=seed)
    assert config.cohort_size == cohort
    return Arrivals(config, concurrency, seconds)


def simulator(clients=40, **system):
    config = RunConfig(clients=clients, participation=0.1, local_epochs=1, system=system)
    return config.simulated(lambda client: 160)


# --- the order of arrival ----------------------------------------------------------------------------------------


def test_equal_clients_by_hand():
    """All arrive at once: of the next three, two got their models before the step and one after it."""
    there = arrivals(concurrency=3, cohort=3)
    assert (list(there[0].staleness.values()), there[0].clock) == ([0, 0, 0], 1.0)
    assert (sorted(there[1].staleness.values()), there[1].clock) == ([0, 1, 1], 2.0)


def test_one_slow_client_by_hand():
    """A server step per update: the slow client's, which takes 10.5 s, is as old as the others' steps meanwhile."""
    begun: list[int] = []

    def seconds(step, client):
        begun.append(client)
        return 10.5 if client == begun[0] else 1.0

    there = arrivals(concurrency=2, cohort=1, clients=1000, seconds=seconds)
    for step in range(10):
        assert (list(there[step].staleness.values()), there[step].clock) == ([0], step + 1.0)
    assert (there[10].staleness, there[10].clock) == ({begun[0]: 10}, 10.5)
    assert (list(there[11].staleness.values()), there[11].clock) == ([1], 11.0)


def test_one_client_at_a_time_is_never_stale():
    there = arrivals(concurrency=1, cohort=1)
    assert [(sum(there[step].staleness.values()), there[step].clock) for step in range(4)] == [
        (0, 1.0),
        (0, 2.0),
        (0, 3.0),
        (0, 4.0),
    ]


def test_invariants_with_slow_clients():
    there, clock = simulator(concurrency=12, **SLOW), 0.0
    ages, slow = [], []
    for step in range(200):
        buffer = there.arrivals[step]
        assert len(buffer.staleness) == 4
        assert list(buffer.staleness) == sorted(buffer.staleness)
        assert all(0 <= tau <= step for tau in buffer.staleness.values())
        assert buffer.clock >= clock
        assert there.round_seconds(step, []) == pytest.approx(buffer.clock - clock)
        clock = buffer.clock
        ages += buffer.staleness.values()
        slow += [there.simulated(step, client).seconds >= 100 for client in buffer.staleness]
    assert max(ages) > 12 / 4
    assert clock < 200 * 100, "a round that waited would take a slow client's 100 s"
    assert 0 < np.mean(slow) < 0.3, "slow clients arrive less often than others"


def test_it_is_a_pure_function_of_the_seed_in_any_order_of_questions():
    one, other = simulator(concurrency=6, **SLOW).arrivals, simulator(concurrency=6, **SLOW).arrivals
    late = one[7]
    assert [one[step] for step in range(7)] + [late] == [other[step] for step in range(8)]
    assert arrivals(6, 3, seed=1)[5] != arrivals(6, 3, seed=2)[5]


def test_as_few_clients_as_are_allowed():
    there = arrivals(concurrency=3, cohort=3, clients=5)
    assert all(len(there[step].staleness) == 3 for step in range(30))


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["availability", "no_show", "dropout", "stragglers", "deadline"])
def test_lost_clients_beside_it(fault):
    with raises(ConfigError, "--system", "concurrency", fault):
        RunConfig.create({"system": {"concurrency": 2, fault: 0.5}})


def test_more_clients_than_there_are():
    with raises(ConfigError, "concurrency", "3 clients", "up to 2", "run's 4"):
        RunConfig.create({"clients": 4, "participation": 0.75, "system": {"concurrency": 3}})


class StartsLate(Plugin):
    """Stands for a method that starts clients from older models."""

    reads = ("staleness",)


class Selects(Plugin):
    @hookimpl
    def select_clients(self, server):
        return [0]


class Exchanges(Plugin):
    exchanges = Exchange(("classifier.*",), lambda epochs: {1})

    @hookimpl
    def mid_local_epoch(self, snapshots):
        return None


FEW = {"clients": 8, "participation": 0.25, "system": {"concurrency": 4, "slow": 0.5}}


def test_methods_that_know_nothing_of_it(go):
    with raises(ConfigError, "--plugin"):
        go(**FEW)
    with raises(ConfigError, "'selects'"):
        go(StartsLate, Selects, **FEW)
    with raises(ConfigError, "'exchanges'"):
        go(StartsLate, Exchanges, local_epochs=2, **FEW)


# --- in a run ----------------------------------------------------------------------------------------------------

SEEN: dict[int, dict[int, int]] = {}


class Looks(Plugin):
    """Notes what hooks see of it."""

    @hookimpl
    def begin_round(self, server):
        SEEN[server.round] = dict(server.staleness)


def test_the_cohort_are_those_who_arrive_and_the_clock_is_the_arrivals(go):
    SEEN.clear()
    result = go(StartsLate, Looks, rounds=4, **FEW)
    there = result.config.simulated(partition_of(result).train.size).arrivals
    for line in lines(result):
        buffer = there[line["round"]]
        assert line["cohort"] == list(buffer.staleness)
        assert SEEN[line["round"]] == buffer.staleness
        assert line["system"]["staleness"] == {str(client): tau for client, tau in buffer.staleness.items()}
        assert line["virtual_time"] == pytest.approx(buffer.clock)


def test_without_it_hooks_see_no_staleness(go):
    SEEN.clear()
    result = go(Looks, rounds=1, system={"slow": 0.5})
    assert SEEN == {0: {}}
    assert "staleness" not in lines(result)[0]["system"]
