"""The simulated system: who is there, who is lost, who does less, who is slow; and what becomes of a round then."""

from __future__ import annotations

import itertools
from collections import Counter
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
import yaml

import fedcore
from fedcore import (
    ConfigError,
    Exchange,
    Interrupted,
    Plugin,
    RoundFailedError,
    RunConfig,
    UnknownNameError,
    hookimpl,
    question,
    resume,
)
from fedcore.engines import InProcessEngine
from fedcore.tools import RunDirectory
from fedcore_testing import committed, federate, model_bytes, needs_of, records, weights
from tests.sentences import raises, warns

EQUAL = {"partition": "iid", "clients": 3, "batch_size": 64}
"""Three clients of 479 samples: eight mini-batches an epoch."""

FAULTS = {
    "availability": {"availability": 0.5},
    "connectivity": {"no_show": 0.2, "dropout": 0.3},
    "completeness": {"stragglers": 0.6},
    "responsiveness": {"slow": 0.5, "latency": 2.0, "deadline": 30.0, "partial": "drop"},
    "all": {
        "availability": 0.8,
        "day": 3,
        "no_show": 0.1,
        "dropout": 0.2,
        "stragglers": 0.3,
        "slow": 0.3,
        "latency": 1.0,
        "deadline": 60.0,
    },
}
# "centralised" has no clients that could be lost: it refuses --system.
METHODS = sorted({point.name for point in entry_points(group="fedcore.plugins")} - {"centralised"})


def start(config, samples=0, breaks=()):
    """Return the system of a run whose clients have so many samples each."""
    return config.simulated(lambda client: samples, breaks)


def simulator(breaks=(), clients=200, samples=160, **system):
    config = RunConfig(clients=clients, local_epochs=10, batch_size=16, seed=3, system=system)
    return start(config, samples, breaks)


def lost(record):
    """Return the cohort's failures of a round: client -> kind."""
    return {failure["client"]: failure["kind"] for failure in record["failures"]}


# --- options -------------------------------------------------------------------------------------------------


def test_options_are_texts_or_a_mapping_and_come_back_from_the_runs_own_config(tmp_path):
    texts = RunConfig(system=["dropout=0.25", "slow=0.5", "deadline=9", "partial=drop"])
    assert texts == RunConfig(system={"dropout": 0.25, "slow": 0.5, "deadline": 9, "partial": "drop"})
    result = federate(tmp_path, system=["dropout=0.25"])
    written = yaml.safe_load((result.directory / "config.yaml").read_text())
    assert (written["system"]["dropout"], written["system"]["step_seconds"]) == (0.25, 1.0)
    assert RunDirectory.open(result.directory).read_config().system == RunConfig(system=["dropout=0.25"]).system


@pytest.mark.parametrize(
    ("system", "named"),
    [
        (["dropout"], ("OPTION=VALUE",)),
        (["dropout=0.1", "dropout=0.2"], ("dropout",)),
        (["dropout=1.5"], ("dropout", 1.5)),
        (["availability=0"], ("availability", 0)),
        (["deadline=.inf"], ("deadline", "inf")),
        (["partial=keep"], ("partial", "'aggregate'", "'drop'")),
        ({"slow_factor": 0.5}, ("slow_factor", 1)),
        (7, ("7",)),
    ],
)
def test_a_wrong_option_says_which_and_what_it_takes(system, named):
    with raises(ConfigError, "--system", *named):
        RunConfig.create({"system": system})


def test_an_option_that_is_no_yaml_is_named_with_what_yaml_says():
    with pytest.raises(ConfigError, match=r"--system dropout=\[1: .*not valid YAML \(while parsing"):
        RunConfig.create({"system": ["dropout=[1"]})


def test_an_unknown_option_gets_a_suggestion():
    with raises(UnknownNameError, "'dropuot'", "'dropout'"):
        RunConfig.create({"system": {"dropuot": 0.1}})


def idle(**system):
    notes = RunConfig(clients=10, system=system).system.idle(RunConfig(clients=10))
    return [note.removeprefix("--system ").partition("=")[0] for note in notes]


def test_options_without_effect_are_named():
    assert idle(day=5) == ["day"]
    assert idle(slow=0.04) == ["slow"]
    assert idle(slow_factor=9.0) == ["slow_factor"]
    assert idle(partial="drop", dropout=0.5) == ["partial"]
    assert idle(day=5, availability=0.5, slow=0.1, slow_factor=9.0, partial="drop", deadline=9.0) == []
    assert idle(partial="drop", stragglers=0.5, slow_factor=4.0) == []


def test_a_run_tells_of_an_option_without_effect(tmp_path):
    with warns(RuntimeWarning, "--system day=5", "availability"):
        federate(tmp_path, clients=2, rounds=1, samples=64, system={"day": 5})


def test_stragglers_need_a_second_epoch():
    with raises(ConfigError, "--local-epochs", "2"):
        RunConfig.create({"system": {"stragglers": 0.5}, "local_epochs": 1})


# --- draws ---------------------------------------------------------------------------------------------------


def test_fates_depend_on_the_seed_the_round_and_the_client_alone():
    system = FAULTS["all"]
    one, other = simulator(**system), simulator(**system)
    forward = {(r, c): one.simulated(r, c) for r in range(5) for c in range(200)}
    backward = {(r, c): other.simulated(r, c) for r in reversed(range(5)) for c in reversed(range(200))}
    assert forward == backward
    assert len({forward[r, 0].seconds for r in range(5)}) > 1, "rounds differ"


def test_availability_is_a_chance_in_every_round():
    drawn = [simulator(availability=0.3).available(r) for r in range(50)]
    assert 0.27 < np.mean([len(each) for each in drawn]) / 200 < 0.33
    assert drawn[0] != drawn[1]
    assert all(list(each) == sorted(each) for each in drawn)


def test_in_a_day_each_client_has_its_own_hours():
    there = simulator(availability=0.5, day=8)
    by_round = [set(there.available(r)) for r in range(16)]
    assert by_round[:8] == by_round[8:], "every day is the same"
    hours = Counter(client for each in by_round[:8] for client in each)
    assert set(hours.values()) == {4}, "half of the day each"
    assert len({frozenset(each) for each in by_round[:8]}) == 8


def test_slow_clients_are_a_fraction_and_stay_slow():
    simulated = [[simulator(slow=0.25, slow_factor=5).simulated(r, c).seconds for c in range(200)] for r in (0, 7)]
    assert simulated[0] == simulated[1]
    # 160 samples are 10 mini-batches, of a virtual second each, in 10 epochs.
    assert Counter(simulated[0]) == {100.0: 150, 500.0: 50}


def test_latency_has_the_mean_that_was_asked_for():
    over = [simulator(latency=7.0).simulated(r, c).seconds - 100 for r in range(20) for c in range(200)]
    assert min(over) >= 0
    assert 6.5 < np.mean(over) < 7.5


@pytest.mark.parametrize(
    ("deadline", "epochs", "seconds", "kind"),
    [(1000, 10, 100, None), (100, 10, 100, None), (99.9, 9, 90, None), (35, 3, 30, None), (9.9, 0, 9.9, "deadline")],
)
def test_the_deadline_leaves_the_epochs_that_fit(deadline, epochs, seconds, kind):
    simulated = simulator(deadline=deadline).simulated(0, 0)
    assert (simulated.completed, simulated.seconds, simulated.failure and simulated.failure[0]) == (
        epochs,
        seconds,
        kind,
    )


def test_work_that_ends_at_the_deadline_counts_whatever_rounding_adds():
    """10 mini-batches of 0.07 seconds, 10 times: in floating point 7.000000000000001."""
    simulated = simulator(deadline=7, step_seconds=0.07).simulated(0, 0)
    assert (simulated.completed, simulated.failure) == (10, None)
    assert simulated.seconds == pytest.approx(7)


def test_partial_work_that_is_dropped_costs_the_time_until_the_deadline():
    simulated = simulator(deadline=35, partial="drop").simulated(0, 0)
    assert (simulated.completed, simulated.seconds, simulated.failure[0]) == (3, 35, "deadline")
    assert simulated.failure[1] == "completed 3 of 10 local epochs; partial work is dropped"


def test_latency_beyond_the_deadline_and_a_client_without_samples():
    late = simulator(samples=0, latency=50.0, deadline=1.0)
    simulated = [late.simulated(0, c) for c in range(200)]
    assert {simulated.failure and simulated.failure[0] for simulated in simulated} == {None, "deadline"}
    assert all(simulated.seconds <= 1.0 for simulated in simulated)


def test_stragglers_complete_fewer_epochs_in_the_same_time():
    simulated = [simulator(stragglers=0.5).simulated(0, c) for c in range(200)]
    fewer = [simulated for simulated in simulated if simulated.completed < 10]
    assert 70 < len(fewer) < 130
    assert {simulated.completed for simulated in fewer} == set(range(1, 10))
    assert all(simulated.seconds == pytest.approx(100) and simulated.failure is None for simulated in simulated)


def test_stragglers_are_not_the_lost_clients():
    slow, lossy = simulator(stragglers=0.5), simulator(dropout=0.5)
    both = [slow.simulated(0, c).completed < 10 and lossy.simulated(0, c).failure is not None for c in range(200)]
    assert 30 < sum(both) < 70, "a quarter"


def test_a_straggler_whose_work_is_dropped_costs_the_time_of_its_whole_work():
    simulated = simulator(stragglers=1.0, partial="drop").simulated(0, 0)
    assert simulated.failure[0] == "deadline"
    assert simulated.seconds == pytest.approx(100)


def test_a_client_is_lost_somewhere_in_its_training():
    simulated = [simulator(dropout=1.0).simulated(0, c) for c in range(200)]
    assert {simulated.failure[0] for simulated in simulated} == {"dropped"}
    assert {simulated.completed for simulated in simulated} == set(range(10))
    assert all(f"local epoch {simulated.completed + 1} of 10" in simulated.failure[1] for simulated in simulated)
    assert all(
        10 * simulated.completed <= simulated.seconds < 10 * (simulated.completed + 1) for simulated in simulated
    )


def test_partial_work_without_an_epoch_after_the_last_exchange_is_lost():
    simulated = [simulator(breaks=(2, 5), stragglers=1.0).simulated(0, c) for c in range(200)]
    assert {simulated.completed for simulated in simulated if simulated.failure is None} == {6, 7, 8, 9}
    assert {(simulated.completed, simulated.failure[0]) for simulated in simulated if simulated.failure} == {
        (e, "dropped") for e in range(1, 6)
    }
    reached = next(simulated for simulated in simulated if simulated.completed == 5)
    assert reached.failure, "it takes part in the exchange at epoch 5, and is lost before the end"


def test_a_round_lasts_until_the_last_client_is_in():
    there = simulator(slow=0.5)
    assert there.round_seconds(0, [there.simulated(0, c) for c in range(200)]) == 400
    assert there.round_seconds(0, []) == 0
    assert simulator(deadline=30).round_seconds(0, []) == 30


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["fedavg", "fedcme", "scaffold"])
def test_an_ideal_system_changes_no_bit(tmp_path, method):
    options = {"clients": 6, "participation": 0.5, "local_epochs": 2, "rounds": 3}
    plain = federate(tmp_path, method, **options)
    ideal = federate(tmp_path, method, **options, system={"step_seconds": 2.0})
    assert model_bytes(ideal) == model_bytes(plain)
    assert committed(ideal).manifest == committed(plain).manifest
    found = records(ideal)
    added = [{key: record.pop(key) for key in ("virtual_time", "system")} for record in found]
    assert found == records(plain)
    assert [each["virtual_time"] for each in added] == sorted(each["virtual_time"] for each in added)
    assert "virtual_time" not in records(plain)[0]
    assert "system" not in plain.summary


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova", "feddyn", "fedprox"])
def test_two_of_four_epochs_are_what_two_epochs_are(tmp_path, method):
    """All clients are cut off after two epochs, so steps, state and weights are those of a run of two."""
    whole = federate(tmp_path, method, **EQUAL, local_epochs=2)
    cut = federate(tmp_path, method, **EQUAL, local_epochs=4, system={"deadline": 16.0})
    assert model_bytes(cut) == model_bytes(whole)
    assert records(cut)[0]["system"]["partial"] == {"0": 2, "1": 2, "2": 2}
    assert [record["virtual_time"] for record in records(cut)] == [16.0, 32.0]


class Steps(Plugin):
    """Keeps how many steps each update says it took."""

    @hookimpl
    def accumulate(self, server, update):
        server.state[f"{server.round}/{update.client}"] = update.steps


def test_an_update_counts_the_steps_of_its_own_epochs(tmp_path):
    result = federate(tmp_path, Steps, **EQUAL, local_epochs=4, system={"stragglers": 0.7}, rounds=4)
    (steps,) = committed(result).plugins.values()
    expected = {
        f"{record['round']}/{client}": 8 * record["system"]["partial"].get(str(client), 4)
        for record in records(result)
        for client in record["system"]["took_part"]
    }
    assert steps == expected
    assert len(set(expected.values())) > 1


class Chosen(Plugin):
    """Selects given clients, round by round."""

    class Options(fedcore.PluginOptions):
        rounds: list[list[int]] = []

    @hookimpl
    def select_clients(self, server):
        return self.options.rounds[server.round]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon"])
def test_who_is_lost_leaves_no_trace(tmp_path, method):
    options = {"clients": 6, "rounds": 4}
    faulty = federate(tmp_path, method, **options, system={"no_show": 0.2, "dropout": 0.4})
    kinds = {kind for record in records(faulty) for kind in lost(record).values()}
    assert kinds == {"unavailable", "dropped"}
    took_part = [record["system"]["took_part"] for record in records(faulty)]
    without = federate(tmp_path, method, (Chosen, {"rounds": took_part}), **options)
    assert model_bytes(faulty) == model_bytes(without)
    assert committed(faulty).manifest == committed(without).manifest
    for record in records(faulty):
        assert sorted([*record["system"]["took_part"], *lost(record)]) == record["cohort"]


def test_who_cannot_be_reached_is_sent_nothing(tmp_path):
    result = federate(tmp_path, clients=6, rounds=3, system={"no_show": 0.4, "dropout": 0.2})
    for record in records(result):
        reached = len(record["cohort"]) - Counter(lost(record).values())["unavailable"]
        size = record["bytes"]["up"] / record["accepted"]
        assert record["bytes"]["down"] == reached * size


def test_the_cohort_is_drawn_from_the_available(tmp_path):
    result = federate(tmp_path, clients=10, participation=0.4, rounds=6, system={"availability": 0.4}, seed=1)
    there = start(RunConfig(clients=10, seed=1, system={"availability": 0.4}))
    for record in records(result):
        available = there.available(record["round"])
        assert set(record["cohort"]) <= set(available)
        assert len(record["cohort"]) == min(4, len(available))
        assert record["failures"] == []


def test_a_plugin_that_selects_an_unavailable_client_does_not_get_it(tmp_path):
    system = {"availability": 0.5}
    everyone = (Chosen, {"rounds": [[0, 1, 2, 3], [0, 1, 2, 3]]})
    result = federate(tmp_path, everyone, clients=4, rounds=2, system=system)
    there = start(RunConfig(clients=4, system=system))
    for record in records(result):
        assert record["system"]["took_part"] == list(there.available(record["round"]))
        assert set(lost(record).values()) == {"unavailable"}


class Asks(Plugin):
    """Asks everyone before every round and after the last."""

    @hookimpl
    def begin_round(self, server):
        server.state[f"{server.round}"] = [answer.client for answer in server.ask("all", self.size)]

    @question
    def size(self, client):
        return {"n": torch.tensor(client.n)}

    @hookimpl
    def post_train(self, server):
        server.state["after"] = [answer.client for answer in server.ask("all", self.size)]


def test_questions_reach_who_is_there_and_everyone_after_training(tmp_path):
    system = {"availability": 0.6, "no_show": 0.2}
    result = federate(tmp_path, Asks, clients=6, rounds=3, system=system, seed=2)
    (state,) = committed(result).plugins.values()
    there = start(RunConfig(clients=6, seed=2, system=system))
    for record in records(result):
        number = record["round"]
        assert state[str(number)] == [client for client in range(6) if there.reachable(number, client)]
        missing = [failure["client"] for failure in record["failures"]]
        assert sorted(missing) == sorted(set(range(6)) - set(state[str(number)])), "each recorded once"
    assert state["after"] == list(range(6))


# --- rounds that nothing comes of ------------------------------------------------------------------------------


class CountsRounds(Plugin):
    """Counts the rounds, from 1."""

    @hookimpl
    def begin_round(self, server):
        server.state["rounds"] = server.state.get("rounds", 0) + 1


NOBODY = {"availability": 0.05}  # of three clients, in some rounds


def test_a_round_without_anybody_stops_the_run_and_says_what_would_go_on(tmp_path):
    with raises(RoundFailedError, "--min-clients", "0"):
        federate(tmp_path, rounds=3, system=NOBODY)


@pytest.mark.filterwarnings("ignore:fedcme")
@pytest.mark.parametrize("method", ["fedavg", "fedproc", ("fedeccr", {"correct": False}), "fedcme"], ids=str)
def test_without_a_least_number_of_clients_such_a_round_changes_nothing(tmp_path, method):
    system = {"availability": 0.35, "dropout": 0.5, "deadline": 40.0}
    options = {"clients": 3, "rounds": 6, "local_epochs": 2, "min_clients": 0, "seed": 18}
    result = federate(tmp_path, method, CountsRounds, **options, system=system)
    found = [record for record in records(result) if "cohort" in record]
    assert len(found) == 6
    assert committed(result).plugins["countsrounds"]["rounds"] == sum(record["accepted"] > 0 for record in found)
    assert {len(record["cohort"]) for record in found} >= {0, 1}
    assert [] in [record["system"]["took_part"] for record in found if record["cohort"]], "all were lost, too"
    assert any(record["accepted"] for record in found)
    for before, after in itertools.pairwise(found):
        if not after["accepted"]:
            assert after["metrics"]["global"] == before["metrics"]["global"]
            assert after["losses"] == {}
        assert after["virtual_time"] > before["virtual_time"]
    assert not found[0]["accepted"], "this seed begins with a lost round"


# --- the exchange amid the training ----------------------------------------------------------------------------


class Exchanges(Plugin):
    """Notes who pauses at epoch 2."""

    exchanges = Exchange(("classifier.*",), lambda epochs: {2})

    @hookimpl
    def mid_local_epoch(self, server, snapshots):
        server.state[f"{server.round}"] = sorted(snapshots)


def test_who_reaches_the_exchange_takes_part_in_it_and_is_lost_after_it(tmp_path):
    engines = []

    def engine(spec):
        engines.append(InProcessEngine(spec))
        return engines[-1]

    system = {"no_show": 0.1, "dropout": 0.3, "stragglers": 0.5}
    options = {"clients": 8, "local_epochs": 4, "rounds": 4}
    result = federate(tmp_path, Exchanges, **options, system=system, engine=engine)
    (paused,) = committed(result).plugins.values()
    there = start(RunConfig(**options, system=system), 100, (2,))
    after = set()
    for record in records(result):
        simulated = {client: there.simulated(record["round"], client) for client in record["cohort"]}
        assert paused[str(record["round"])] == [
            client for client, simulated in simulated.items() if simulated.completed >= 2
        ]
        assert record["system"]["took_part"] == [
            client for client, simulated in simulated.items() if not simulated.failure
        ]
        after |= set(paused[str(record["round"])]) - set(record["system"]["took_part"])
    assert after, "somebody was lost after the exchange"
    assert engines[0]._runtime._sessions == {}, "and its session ended with it"


def test_fedcme_keeps_its_own_where_a_counterpart_never_came_to_the_exchange(tmp_path):
    system = {"slow": 0.5, "deadline": 40.0}  # eight batches an epoch: fast ones do 4 epochs, slow ones 1
    with warns(RuntimeWarning, "fedcme", "client "):
        result = federate(
            tmp_path, "fedcme", **{**EQUAL, "clients": 4, "batch_size": 48}, local_epochs=4, system=system
        )
    for record in records(result):
        assert set(lost(record).values()) == {"dropped"}
        assert len(record["system"]["took_part"]) == 2
        assert record["failures"][0]["message"] == "completed 1 of 4 local epochs, none after the exchange at epoch 2"


# --- the same for everyone -------------------------------------------------------------------------------------


def check_workers(tmp_path, method, numbers):
    here = federate(tmp_path, method, clients=6, local_epochs=3, rounds=3, system=FAULTS["all"])
    for workers in numbers:
        there = federate(tmp_path, method, clients=6, local_epochs=3, rounds=3, system=FAULTS["all"], workers=workers)
        assert model_bytes(there) == model_bytes(here)
        assert records(there) == records(here)
        assert committed(there).manifest == committed(here).manifest
        assert there.summary["system"] == here.summary["system"]


@pytest.mark.filterwarnings("ignore:fedcme")
def test_the_same_faults_for_two_workers(tmp_path):
    check_workers(tmp_path, "fedcme", [2])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcme", "scaffold", "moon"])
@pytest.mark.filterwarnings("ignore:fedcme")
def test_the_same_faults_for_any_number_of_workers(tmp_path, method):
    check_workers(tmp_path, method, [1, 2, 3])


@pytest.mark.parametrize("method", ["fedcme", "scaffold"])
@pytest.mark.filterwarnings("ignore:fedcme")
def test_a_run_goes_on_with_the_same_faults(tmp_path, method):
    options = {"clients": 6, "local_epochs": 3, "rounds": 4, "system": FAULTS["all"]}
    whole = federate(tmp_path, method, **options)

    def stop(event, details):
        if event == "round" and details["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        federate(tmp_path, method, **options, out=tmp_path / "stopped", notify=stop)
    again = resume(tmp_path / "stopped")
    assert model_bytes(again) == model_bytes(whole)
    assert records(again) == records(whole)
    assert again.summary["system"] == whole.summary["system"]


def check_survives(tmp_path, method, pattern):
    """Three rounds under faults: whoever took part is accounted for, and the model is finite."""
    options = {"clients": 8, "rounds": 3, "local_epochs": 3, "client_test_fraction": 0.2, "min_clients": 0}
    result = federate(tmp_path, method, **options, **needs_of(method), system=FAULTS[pattern])
    found = [record for record in records(result) if "cohort" in record]
    assert len(found) == 3
    for record in found:
        assert set(lost(record).values()) <= {"unavailable", "dropped", "deadline"}
        cohort = record["cohort"]  # power-of-choice asks more clients than it chooses, and some of these are lost
        assert sorted([*record["system"]["took_part"], *(c for c in lost(record) if c in cohort)]) == cohort
    counts = result.summary["system"]
    assert counts["selected"] == sum(len(record["cohort"]) for record in found)
    assert counts["accepted"] == sum(len(record["system"]["took_part"]) for record in found)
    assert counts["virtual_time"] == found[-1]["virtual_time"]
    assert counts["lost"] or counts["partial"] or counts["selected"] < 24, "the pattern did something"
    assert counts["accepted"] > 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(result).values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "pattern"), [("fedcd", "all"), ("fedproc", "all"), ("uscc", "all")])
def test_methods_survive(tmp_path, method, pattern):
    check_survives(tmp_path, method, pattern)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("pattern", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_survives_every_pattern(tmp_path, method, pattern):
    check_survives(tmp_path, method, pattern)
