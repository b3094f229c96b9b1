"""sweep --optuna: trials, pruning, going on, on held-out parts only."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

import fedcore
from fedcore import ConfigError, RunDirectoryError
from fedcore.tools import protocols, safe_yaml
from fedcore_study import search as searching
from fedcore_study.search import Axis, parse_search, search
from fedcore_study.sweeps.child import judged, measured
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.processes import Outcome
from fedcore_study.sweeps.spec import SweepSpec
from fedcore_testing import records
from tests.sentences import raises, refused

optuna = pytest.importorskip("optuna", reason="optuna is not installed: make setup installs it")

BASE = {
    "clients": 2,
    "rounds": 2,
    "local_epochs": 1,
    "samples": 100,
    "batch_size": 64,
    "workers": 0,
    "client_test_fraction": 0.3,
}


MOON = {"moon": {"mu": 1, "temperature": 2}}


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("lr=0.001..0.1:log", Axis("lr", 0.001, 0.1, log=True)),
        ("batch-size=8..64", Axis("batch_size", 8, 64)),
        ("fedprox.mu=1e-3..1", Axis("fedprox.mu", 0.001, 1)),
        ("plugin=fedavg,moon+uscc", Axis("plugins", choices=("fedavg", "moon+uscc"))),
        ("plugin=fedavg,{moon: {mu: 1, temperature: 2}}", Axis("plugins", choices=("fedavg", MOON))),
        ("local-epochs=1,5", Axis("local_epochs", choices=(1, 5))),
    ],
)
def test_axes(text, axis):
    assert parse_search(text) == axis


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=0.1..0.01", "lr=0..1:log", "lr=0.1..1:linear", "lr=a..b"])
def test_other_texts_are_refused(text):
    with raises(ConfigError, "OPTION=LOW..HIGH"):
        parse_search(text)


def test_a_search_is_valued_on_held_out_parts_and_goes_on(cli, tmp_path):
    flags = [word for name, value in BASE.items() for word in ("--" + name.replace("_", "-"), value)]
    asked = ("--search", "lr=0.001..0.3:log", "--search", "momentum=0.0,0.9", "--out", "s", "--json")
    first = cli("sweep", "--optuna", 2, *flags, "--buffers", "local", *asked)
    assert first.stderr.count("--buffers local has no effect with --model mlp, which has no buffers") == 1  # of both
    found = json.loads(first.stdout)
    for trial in found["trials"]:
        lines = records(tmp_path / "s" / "runs" / f"trial-{trial['trial']:04d}")
        assert trial["accuracy"] == max(line["metrics"]["global_local"]["accuracy"] for line in lines)
        assert 0.001 <= trial["options"]["lr"] <= 0.3
        assert trial["options"]["momentum"] in (0.0, 0.9)
    best = max(found["trials"], key=lambda trial: trial["accuracy"])
    assert found["trials"][found["best"]]["accuracy"] == best["accuracy"]
    more = json.loads(cli("sweep", "--optuna", 3, *flags, "--buffers", "local", *asked).stdout)
    assert more["trials"][:2] == found["trials"]
    assert len({trial["options"]["lr"] for trial in more["trials"]}) == 3  # no draw again
    config = fedcore.RunConfig.create(safe_yaml.read_yaml((tmp_path / "s" / "best.yaml").read_text()))
    assert config.lr == more["trials"][more["best"]]["options"]["lr"]


def test_a_search_by_the_loss_wants_less_of_it(cli, tmp_path):
    flags = [word for name, value in BASE.items() for word in ("--" + name.replace("_", "-"), value)]
    asked = ("sweep", "--optuna", 3, *flags, "--search", "lr=0.001..0.3:log", "--out", "s")
    found = json.loads(cli(*asked, "--best-by", "loss", "--json").stdout)
    for trial in found["trials"]:
        lines = records(tmp_path / "s" / "runs" / f"trial-{trial['trial']:04d}")
        assert trial["loss"] == min(line["metrics"]["global_local"]["loss"] for line in lines)
    best = min(found["trials"], key=lambda trial: trial["loss"])
    assert found["best"] == best["trial"]
    table = cli(*asked, "--best-by", "loss").stdout
    assert "loss on held-out parts" in table
    assert table.index(f"{best['loss']:.4f}") == min(table.index(f"{trial['loss']:.4f}") for trial in found["trials"])
    refused(cli(*asked), "--best-by", "loss")


def begun(number):
    return b'{"op_code":4,"worker_id":"w","study_id":0,"datetime_start":"2026-11-24T00:00:0%d"}\n' % number


CREATED = b'{"op_code":0,"worker_id":"w","study_name":"fedcore","directions":[2]}\n'


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(CREATED + begun(1)[:40], 2, id="cut-off"),
        pytest.param(CREATED + begun(1)[:-1], 2, id="without-its-end"),
        pytest.param(CREATED + begun(1) + b"\x00\x00\xff\xfe", 3, id="foreign-bytes"),
        pytest.param(CREATED + b"\x00" * 20 + begun(1), 2, id="foreign-bytes-between"),
        pytest.param(CREATED + b"[]\n", 2, id="other-json"),
    ],
)
def test_a_damaged_study_is_named_and_goes_on_without_the_damage(tmp_path, monkeypatch, content, line):
    monkeypatch.setattr(searching, "run_jobs", played(ROUND))
    file = tmp_path / "study.log"
    file.write_bytes(content)
    asked = (SweepSpec(base=BASE), [Axis("lr", 0.1, 1.0)], 1, tmp_path)
    with pytest.raises(ConfigError, match=rf"study\.log: line {line} is damaged .*another --out"):
        search(*asked)
    file.write_bytes(b"".join(content.splitlines(keepends=True)[: line - 1]))
    assert [trial.state for trial in search(*asked).trials] == ["complete"]


ROUND = {"round": 1, "accuracy": 0.9, "validation": 0.5}


def played(*rounds, status="finished"):
    """Return what stands in for run_jobs: each job has these rounds until it is stopped."""

    def run_jobs(jobs, parallel, listen, start):
        for job in jobs:
            listen(job.name, "start", {})
            for details in rounds:
                if listen(job.name, "round", details) is False:
                    break
            listen(job.name, status, {"message": "", "seconds": 0.0})
        return [Outcome(job.name, status) for job in jobs], status == "stopped"

    return run_jobs


@pytest.mark.parametrize(
    ("base", "axes", "named"),
    [
        ({"rounds": 3}, {}, ("--rounds", "2", "3")),
        ({"plugins": ["moon"]}, {}, ("--plugin", "'moon'")),
        ({}, {"plugins": ("moon", "fedavg")}, ("--search",)),
        ({}, {"lr": (0.1, 1.0), "momentum": (0.0, 0.9)}, ("--search", "0.0", "0.9")),
    ],
)
def test_a_study_goes_on_with_its_own_options_alone(tmp_path, monkeypatch, base, axes, named):
    """Trials that were run with other options are no rivals; a choice is kept as its place among the values."""
    monkeypatch.setattr(searching, "run_jobs", played(ROUND))

    def asked(base, **axes):
        return SweepSpec(base={**BASE, **base}), [Axis(name, choices=values) for name, values in axes.items()]

    choices = {"plugins": ("fedavg", "moon"), "lr": (0.1, 1.0)}
    before = search(*asked({}, **choices), 2, tmp_path)
    with raises(ConfigError, "study.log", "--out", *named):
        search(*asked(base, **{**choices, **axes}), 3, tmp_path)
    after = search(*asked({"workers": 1}, **choices), 3, tmp_path)  # it has no effect on a trial's results
    assert after.trials[:2] == before.trials
    assert len(after.trials) == 3


def test_two_values_that_do_not_go_together_refuse_no_search(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "run_jobs", played(ROUND))
    axes = [Axis("participation", 0.5, 1.0), Axis("min_clients", 1, 2)]
    assert len(search(SweepSpec(base=BASE), axes, 4, tmp_path).trials) == 4


def test_an_option_of_a_plugin_is_drawn_for_the_trials_that_have_the_plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "run_jobs", played(ROUND))
    axes = [Axis("moon.mu", 0.1, 1.0), Axis("plugins", choices=("fedavg", "moon+uscc"))]
    trials = search(SweepSpec(base=BASE), axes, 8, tmp_path).trials
    assert {("moon.mu" in trial.options, trial.options["plugins"]) for trial in trials} == {
        (False, "fedavg"),
        (True, "moon+uscc"),
    }


@pytest.mark.slow
def test_a_hopeless_trial_is_pruned_in_its_first_round(tmp_path, monkeypatch):
    """Trials are judged by those before their batch. Two of the second batch cannot learn, and end after one round."""
    heard = []
    spec = SweepSpec(base={**BASE, "rounds": 2})
    axes = [Axis("lr", choices=(0.05, 1e-12))]
    drawn = iter([0, 0, 0, 0, 1, 0, 1, 0])
    monkeypatch.setattr(Axis, "suggest", lambda axis, trial: axis.choices[trial.suggest_int("lr", n := next(drawn), n)])
    result = search(spec, axes, 8, tmp_path, listen=lambda *told: heard.append(told[:2]))
    states = ["complete"] * 4 + ["pruned", "complete", "pruned", "complete"]
    assert [trial.state for trial in result.trials] == states
    for trial in result.trials:
        lines = records(trial.directory)
        assert len(lines) == (1 if trial.state == "pruned" else 2)
        assert trial.value == max(line["metrics"]["global_local"]["accuracy"] for line in lines)
        events = [event for number, event in heard if number == trial.number]
        assert events == ["start", "pruned" if trial.state == "pruned" else "finished"]


@pytest.mark.slow
def test_trials_are_the_same_however_many_run_side_by_side(tmp_path):
    def found(parallel):
        axes = [Axis("lr", 0.001, 0.3, log=True)]
        return search(SweepSpec(base=BASE), axes, 6, tmp_path / f"{parallel}", parallel=parallel).trials

    one, two = found(1), found(2)
    assert [(t.options, t.state, t.value) for t in one] == [(t.options, t.state, t.value) for t in two]


def of_seeds(figures, failed=()):
    """Return what stands in for run_jobs: figures of the rounds by trial and seed, and runs that fail at their end."""

    def run_jobs(jobs, parallel, listen, start):
        told = []
        for job in jobs:
            trial, _, seed = job.name.removeprefix("trial-").partition("-seed-")
            listen(job.name, "start", {})
            for number, value in enumerate(figures[int(trial)][int(seed)], start=1):
                told.append(job.name)
                if listen(job.name, "round", {"round": number, "validation": value}) is False:
                    break
            status = "failed" if (int(trial), int(seed)) in failed else "finished"
            listen(job.name, status, {"message": "diverged" * (status == "failed"), "seconds": 0.0})
        heard.append(told)
        return [], False

    heard = []
    run_jobs.heard = heard
    return run_jobs


def test_a_trial_over_seeds_has_the_mean_of_their_best_figures(tmp_path, monkeypatch):
    """The best rate of seed 0 fails on seed 1. The mean over the seeds chooses another one."""
    figures = {0: [[0.9, 0.8], [0.1, 0.2]], 1: [[0.6, 0.7], [0.7, 0.5]], 2: [[1.0], [1.0]], 3: [[0.1], [0.2]]}
    monkeypatch.setattr(searching, "run_jobs", of_seeds(figures, failed=[(2, 1)]))
    told = []
    result = search(
        SweepSpec(base=BASE, seeds=2), [Axis("lr", 0.1, 1.0)], 4, tmp_path, listen=lambda *event: told.append(event[:2])
    )
    assert [trial.value for trial in result.trials] == pytest.approx([0.55, 0.7, None, 0.15])
    assert [trial.state for trial in result.trials] == ["complete", "complete", "fail", "complete"]
    assert result.best.number == 1
    assert [path.name for path in result.best.directories] == ["trial-0001-seed-0", "trial-0001-seed-1"]
    assert told.count((0, "start")) == told.count((0, "finished")) == told.count((2, "failed")) == 1
    with raises(ConfigError, "--seeds", "0,1,2"):
        search(SweepSpec(base=BASE, seeds=3), [Axis("lr", 0.1, 1.0)], 5, tmp_path)


def test_a_trial_over_seeds_is_pruned_by_the_mean_of_a_round(tmp_path, monkeypatch):
    """Trial 4 is good on seed 0 and hopeless on average: seed 1 ends after its first round."""
    good = [[0.6, 0.7], [0.6, 0.7]]
    figures = {**dict.fromkeys(range(4), good), 4: [[0.8, 0.8], [0.0, 0.9]]}
    played_seeds = of_seeds(figures)
    monkeypatch.setattr(searching, "run_jobs", played_seeds)
    result = search(SweepSpec(base=BASE, seeds=2), [Axis("lr", 0.1, 1.0)], 5, tmp_path)
    assert [trial.state for trial in result.trials] == ["complete"] * 4 + ["pruned"]
    assert played_seeds.heard[1] == ["trial-0004-seed-0"] * 2 + ["trial-0004-seed-1"]


@pytest.mark.slow
def test_a_search_over_seeds_by_any_metric_is_compared_at_once(cli, tmp_path):
    flags = [word for name, value in BASE.items() for word in ("--" + name.replace("_", "-"), value)]
    asked = ("--search", "lr=0.001..0.3:log", "--seeds", 2, "--metric", "auroc", "--best-by", "auroc", "--patience", 1)
    found = json.loads(cli("sweep", "--optuna", 2, *flags, *asked, "--out", "s", "--json").stdout)
    for trial in found["trials"]:
        best = [
            max(line["metrics"]["global_local"]["auroc"] for line in records(tmp_path / run))
            for run in trial["run_dirs"]
        ]
        assert trial["auroc"] == pytest.approx(sum(best) / 2)
    chosen = found["trials"][found["best"]]
    (row,) = json.loads(cli("compare", "s", "--format", "json").stdout)["blocks"][0]["rows"]
    assert sorted(row["values"]) == ["0", "1"]
    finals = [json.loads((tmp_path / run / "summary.json").read_text()) for run in chosen["run_dirs"]]
    assert list(row["values"].values()) == [final["metrics"]["global"]["accuracy"] for final in finals]


def test_a_pruned_trial_has_its_best_figure_too(tmp_path, monkeypatch):
    """Not the last one, which stands below figures that are the best of their trials."""
    figures = {**dict.fromkeys(range(4), [[0.6, 0.9]] * 2), 4: [[0.7, 0.8], [0.7, 0.2]]}
    monkeypatch.setattr(searching, "run_jobs", of_seeds(figures))
    told = []
    search_of_two = SweepSpec(base=BASE, seeds=2), [Axis("lr", 0.1, 1.0)], 5, tmp_path
    result = search(*search_of_two, listen=lambda number, event, details: told.append((number, event, details)))
    assert told[-1] == (4, "pruned", {"best": "70.00 %"})  # as the table has it
    assert [trial.value for trial in result.trials] == pytest.approx([0.9] * 4 + [0.7])
    assert result.trials[4].state == "pruned"


def test_a_trial_that_fails_does_not_stop_the_others(tmp_path):
    told = []
    axes = [Axis("lr", 1e30, 1e31)]
    result = search(SweepSpec(base=BASE), axes, 2, tmp_path, listen=lambda *event: told.append(event))
    assert [trial.state for trial in result.trials] == ["fail", "fail"]
    assert result.best is None
    failed = [details["message"] for _, event, details in told if event == "failed"]
    assert len(failed) == 2
    assert "0 of 2 clients gave a usable update" in failed[0]


def test_the_test_set_has_no_value():
    assert measured({"global": {"accuracy": 0.9}}, protocols.VALIDATION) is None
    assert measured({}, protocols.VALIDATION) is None
    found = {"global": None, "personal": {"accuracy": 0.7}, "global_local": {"accuracy": 0.8}}
    assert measured(found, protocols.VALIDATION) == "personal"


def test_rounds_of_fewer_clients_or_undefined_samples_have_no_value():
    """A run itself never chooses them: see ``Evaluator.best``."""
    row = {"accuracy": 0.9, "loss": 0.1, "clients": 4}
    assert judged(fedcore.RunConfig(), row, 4) == 0.9
    assert judged(fedcore.RunConfig(), row, 5) is None
    assert judged(fedcore.RunConfig(), {**row, "undefined": 1}, 4) is None


@pytest.mark.parametrize(
    ("spec", "axes", "named"),
    [
        ({"base": {}}, [Axis("lr", 0.1, 1.0)], ("--optuna", "--client-test-fraction")),
        ({"base": {**BASE, "best_by": "f1"}}, [Axis("lr", 0.1, 1.0)], ("--best-by", "'f1'")),
        (
            {"base": {**BASE, "metrics": ["calibration-slope"], "best_by": "calibration-slope"}},
            [Axis("lr", 0.1, 1.0)],
            ("--best-by calibration-slope",),
        ),
        ({"base": BASE}, [], ("--optuna", "--search")),
        ({"base": BASE}, [Axis("lr", 0.1, 1.0), Axis("lr", 0.01, 0.1)], ("--search lr", "twice")),
        (
            {"base": BASE},
            [Axis("mon.mu", 0.1, 1.0)],
            ("'mon'", "'moon'", "--search mon.mu"),
        ),
        ({"base": BASE, "grid": {"lr": [0.1]}}, [Axis("momentum", 0.1, 0.9)], ("--search", "--grid")),
        ({"base": BASE}, [Axis("moon.mu", 0.1, 1.0)], ("--search moon.mu", "--plugin moon")),
        ({"base": BASE}, [Axis("optimizer", choices=("sgd", "adamm"))], ("--optimizer", "'adam'", "'adamm'")),
        (
            {"base": BASE},
            [Axis("plugins", choices=("fedavg", "moon")), Axis("moon.mu", -1.0, 1.0)],
            ("'moon'", "mu", -1.0),
        ),
    ],
)
def test_what_cannot_be_searched(tmp_path, spec, axes, named):
    with raises(ConfigError, *named):
        search(SweepSpec.create(spec), axes, 1, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(searching.importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError):
        search(SweepSpec(base=BASE), [Axis("lr", 0.1, 1.0)], 1, tmp_path)


def test_options_of_a_search_need_it(cli):
    assert "--search is for --optuna" in cli("sweep", "--search", "lr=0.1..1").stderr
    assert "takes no file and no --grid" in cli("sweep", "--optuna", 2, "--grid", "lr=0.1").stderr
    for submitted in (("--submit", "slurm"), ("--submit-set", "a=1")):
        assert "trials on this machine" in cli("sweep", "--optuna", 2, "--search", "lr=0.1..1", *submitted).stderr


def test_an_interrupt_is_not_a_failed_trial(tmp_path, monkeypatch):
    asked = (SweepSpec(base=BASE), [Axis("lr", 0.1, 1.0)], 3, tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(searching, "run_jobs", played(ROUND, status="stopped"))
        with pytest.raises(KeyboardInterrupt):
            search(*asked)
    monkeypatch.setattr(searching, "run_jobs", played(ROUND))
    trials = search(*asked).trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "complete") for number in range(3)]
    assert search(*asked[:3], tmp_path / "plain").trials == [
        replace(trial, directories=[tmp_path / "plain" / "runs" / f"trial-{trial.number:04d}"]) for trial in trials
    ]
    assert "optuna" in sys.modules


@pytest.mark.slow
def test_a_search_that_was_killed_ends_as_one_that_was_not(tmp_path):
    """Its trials were lost, also those that had ended; compare had their runs in its table, the search did not."""
    asked = (SweepSpec(base=BASE), [Axis("lr", 0.001, 0.3, log=True)], 6)
    plain = search(*asked, tmp_path / "plain").trials

    class Killed(Exception):
        pass

    def dies(number, event, details):
        if (number, event) == (1, "finished"):
            raise Killed  # run_jobs kills the runs

    with pytest.raises(Killed):
        search(*asked, tmp_path / "s", listen=dies, parallel=2)
    trials = search(*asked, tmp_path / "s").trials
    assert [(t.options, t.state, t.value) for t in trials] == [(t.options, t.state, t.value) for t in plain]
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 6


def test_a_search_is_one_of_the_same_samples_and_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "run_jobs", played(ROUND))
    asked = (SweepSpec(base=BASE), [Axis("lr", 0.1, 1.0)], 1, tmp_path)
    with SweepDirectory(tmp_path).lock(), raises(RunDirectoryError, "another sweep"):
        search(*asked)
    monkeypatch.setattr("fedcore.data.data_digest", lambda dataset: "one-file")
    search(*asked)
    monkeypatch.setattr("fedcore.data.data_digest", lambda dataset: "another")
    with raises(ConfigError, "SHA-256 of the samples"):
        search(*asked)
