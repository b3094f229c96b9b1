"""The benchmark: the reference does the engine's steps, sides take turns, and ratios are what they say."""

import json
import signal
import time
from types import FunctionType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedcore.tools import app
from fedcore_bench import measure, profile, workloads
from fedcore_bench.cpu import CpuReference
from fedcore_bench.measure import Spread, engine, in_turn
from fedcore_bench.reference import Task, Trainer
from fedcore_bench.workloads import AGAINST_REFERENCE, W3, Workload
from tests.sentences import refused

TINY = Workload(
    "tiny",
    # One batch per client, so that no shuffling tells the two apart.
    {"dataset": "digits", "model": "mlp", "clients": 4, "participation": 0.5, "local_epochs": 3, "batch_size": 2000,
     "partition": "iid", "weight_decay": 0.0, "eval_every": 2, "workers": 0, "device": "cpu"},
    block=2,
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(AGAINST_REFERENCE, "W1", TINY)
    monkeypatch.setattr(measure, "W3", TINY)
    monkeypatch.setattr("fedcore_bench.cpu.cores", lambda: 1)


@pytest.mark.slow
def test_the_reference_takes_the_steps_of_the_engine(monkeypatch):
    with engine(measure.configured(TINY, {})) as ours:
        federation = ours.experiment.federation
        task = Task.of(federation.config, federation.dataset, federation.partition)
        monkeypatch.setattr("fedcore_bench.cpu.cohort", lambda task, number: ours.experiment_cohorts[number])
        ours.rounds(3)
        records = [json.loads(line) for line in (ours.experiment.directory.path / "metrics.jsonl").open()]
        ours.experiment_cohorts = [record["cohort"] for record in records]
        reference = CpuReference(task, workers=1)
        try:
            reference.rounds(3)
            for name, weight in zip(ours.state.model, reference.task.weights, strict=True):
                torch.testing.assert_close(ours.state.model[name], weight, rtol=1e-4, atol=1e-6)
            assert reference.accuracy == pytest.approx(records[1]["metrics"]["global"]["accuracy"], abs=0.01)
        finally:
            reference.close()


def test_sides_take_turns_back_and_forth_after_a_block_that_does_not_count():
    calls, clock = [], iter(range(100))

    def side(name):
        def run():
            calls.append(name)
            return next(clock)

        return run

    assert in_turn([side("a"), side("b"), side("c")], 2) == [[3, 8], [4, 7], [5, 6]]
    assert "".join(calls) == "abcabccba"


def test_spread_is_median_least_and_greatest():
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


@pytest.mark.slow
def test_throughput_is_relative_to_the_reference(tiny):
    row = measure.against_reference(TINY, {}, blocks=2)
    assert (row.blocks, row.rounds, row.ratio_is) == (2, 2, "throughput")
    assert row.ratio.least <= row.ratio.median <= row.ratio.greatest
    assert 0.5 * row.beside.median / row.seconds.median < row.ratio.median < 2 * row.beside.median / row.seconds.median


def test_a_method_is_timed_beside_fedavg(tiny):
    row = measure.beside_fedavg("moon", {}, blocks=1)
    assert (row.name, row.beside_name, row.ratio_is) == ("W3 moon", "fedavg", "time")
    assert row.ratio.median == pytest.approx(row.seconds.median / row.beside.median)


@pytest.mark.parametrize(
    ("workload", "parameters", "clients", "cohort"),
    [
        ("W1", 582_026, 100, 10),
        ("W2", 92_626, 10, 10),
        ("tiny", 17_226, 1000, 100),
        ("pfl-cifar10", 1_626_442, 1000, 50),
    ],
)
def test_workloads_are_those_of_the_issue(workload, parameters, clients, cohort):
    config = measure.configured(AGAINST_REFERENCE[workload], {})
    shape = {"W1": (1, 28, 28), "tiny": (1, 8, 8)}.get(workload, (3, 32, 32))
    from fedcore_bench.reference import make_model

    assert sum(p.numel() for p in make_model(config, 10, shape).parameters()) == parameters
    assert (config.clients, config.cohort_size) == (clients, cohort)


def test_a_client_of_tiny_takes_one_step_of_16():
    config = measure.configured(AGAINST_REFERENCE["tiny"], {})
    held = workloads.windows_of_16(np.zeros(100, np.int64), config.clients, seed=config.seed)
    assert {len(positions) for positions in held} == {config.batch_size * config.local_epochs} == {16}


def test_w3_is_w2_with_five_epochs():
    differing = {key for key in W3.config if W3.config[key] != workloads.W2.config.get(key)}
    assert differing == {"local_epochs", "eval_every"}


def test_the_command_prints_json_and_a_table(tiny, monkeypatch):
    timed = []

    def row(workload, options, **sizes):
        timed.append((workload.name, options, sizes))
        return measure.Measured(workload.name, "reference", Spread(2, 1, 3), Spread(1, 1, 1), Spread(0.5, 0.4, 0.6),
                                "throughput", 1, 5)  # fmt: skip

    monkeypatch.setattr(measure, "against_reference", row)
    found = CliRunner().invoke(app, ["bench", "--workload", "W2", "--blocks", "1", "--workers", "2", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)[0]["ratio"] == {"median": 0.5, "least": 0.4, "greatest": 0.6}
    assert timed[0][1]["workers"] == 2
    assert timed[0][2] == {"blocks": 1, "block": None}
    shown = CliRunner().invoke(
        app, ["bench", "--workload", "W3", "--plugin", "fedprox", "--blocks", "1", "--workers", "0"]
    )
    assert "W3 fedprox" in shown.stdout


def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def in_module(name, function, **more):
    """Return a function as if it was defined in another module."""
    return FunctionType(function.__code__, {"__name__": name, "busy": busy, **more})


def test_a_parts_time_leaves_out_the_parts_that_it_calls():
    def calls_inner():
        busy(0.01)
        inner()  # noqa: F821 - of the module that it is put into
        busy(0.01)

    work = in_module("made.outer", calls_inner, inner=in_module("made.outer.inner", lambda: busy(0.03)))
    with profile.PartClock({"outer": ["outer"], "inner": ["outer.inner"]}, "made") as clock:
        work()
        busy(0.05)  # outside of all parts
    assert clock.seconds["outer"] == pytest.approx(0.02, abs=0.005)
    assert clock.seconds["inner"] == pytest.approx(0.03, abs=0.005)


def test_the_parts_of_a_round_are_timed():
    with engine(measure.configured(TINY, {})) as ours:
        found = profile.by_part(ours, 2)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert set(found) == {*profile.PARTS, profile.REST}
    assert found["steps"] > 0


def test_bare_steps_draw_nothing_from_the_generator_that_runs_watch():
    with engine(measure.configured(TINY, {})) as ours:
        federation, before = ours.experiment.federation, torch.get_rng_state()
        steps = profile.BareSteps(Task.of(federation.config, federation.dataset, federation.partition))
        assert steps.rounds(1) > 0
        assert torch.equal(torch.get_rng_state(), before)


def test_the_command_lists_the_parts(monkeypatch):
    one = Spread(1, 1, 1)

    def found(workload, **sizes):
        return profile.Profile(workload.name, one, one, one, one, one, {"fold": 0.25}, 100, sizes["blocks"], 5)

    monkeypatch.setattr(profile, "profile", found)
    shown = CliRunner().invoke(app, ["bench", "--profile", "--blocks", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    (row,) = json.loads(shown.stdout)
    assert (row["name"], row["blocks"], row["parts"]) == ("tiny", 2, {"fold": 0.25})
    assert "fold" in CliRunner().invoke(app, ["bench", "--profile"]).stdout


def test_bare_steps_are_every_step_of_the_cohort(monkeypatch):
    with engine(measure.configured(TINY, {})) as ours:
        federation = ours.experiment.federation
        bare = profile.BareSteps(Task.of(federation.config, federation.dataset, federation.partition))
    taken = []
    monkeypatch.setattr(bare.trainer, "step", lambda rows: taken.append(len(rows)))
    bare.rounds(2)
    assert len(taken) == 2 * 2 * 3  # rounds, clients, epochs of one batch
    assert set(taken) <= {len(held) for held in bare.task.holds}


@pytest.mark.parametrize(("options", "sizes"), [({"local_steps": 3}, [200, 100, 200]), ({}, [200, 100] * 3)], ids=str)
def test_the_reference_takes_a_number_of_steps(options, sizes):
    task = Task(
        measure.configured(TINY, {"batch_size": 200, **options}),
        *(torch.zeros(300, 8, 8, 1), torch.zeros(300, dtype=torch.int64)) * 2,
        [torch.arange(300)],
        [],
    )
    trainer, taken = object.__new__(Trainer), []
    trainer.task, trainer.stream, trainer.step = task, torch.Generator(), taken.append
    trainer.begin, trainer.model = lambda: None, torch.nn.Module()
    trainer.train(0)
    assert list(map(len, taken)) == sizes
    assert sorted(torch.cat(taken[:2]).tolist()) == list(range(300))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "W9"], "'W9'"),
        (["--workload", "W3", "--plugin", "nope"], "'nope'"),
        (["--profile", "--workload", "tiny", "--workload", "W3"], "W1, W2, tiny, pfl-cifar10"),
    ],
)
def test_what_does_not_exist_is_said(arguments, named):
    refused(CliRunner().invoke(app, ["bench", *arguments]), named)
