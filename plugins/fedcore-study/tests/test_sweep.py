"""What a sweep plans, and its processes; with jobs that are no runs, so that it is quick."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fedcore import ConfigError, RunConfig, RunDirectoryError, UnknownNameError
from fedcore.client import Setup
from fedcore.data import load_dataset
from fedcore.tools import digest, resolve_config, resolve_partition
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.sweeps.processes import Job, run_jobs
from fedcore_study.sweeps.run import plan_sweep, run_sweep
from fedcore_study.sweeps.spec import SweepSpec, override, parse_axis, parse_seeds, read_spec
from tests.sentences import raises


def cells(**values):
    return list(SweepSpec.create(values).cells())


class TestSpec:
    def test_the_pages_file_is_the_sweep_that_it_says(self, tmp_path):
        page = Path(__file__).parents[3] / "docs" / "sweeps.md"
        (block,) = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        file = tmp_path / "study.yaml"
        file.write_text(block)
        spec = read_spec(file)
        assert set(yaml.safe_load(block)) == {field.alias or name for name, field in SweepSpec.model_fields.items()}
        configs = [config for _, config in spec.cells()]
        assert len(configs) == 2 * 8 * 3
        assert {config.plugins["moon"]["mu"] for config in configs if "moon" in config.plugins} == {5}
        prox = [config for config in configs if "fedprox" in config.plugins]
        assert {(c.partition, c.plugins["fedprox"].get("mu")) for c in prox} == {("iid", None), ("dirichlet", 0.1)}

    def test_every_combination_seed_by_seed(self):
        found = cells(base={"rounds": 3}, grid={"plugin": ["fedavg", "moon"], "alpha": [0.1, 0.5]}, seeds=2)
        assert [label for label, _ in found[:4]] == [
            "fedavg alpha=0.1 seed=0",
            "fedavg alpha=0.5 seed=0",
            "moon alpha=0.1 seed=0",
            "moon alpha=0.5 seed=0",
        ]
        assert [config.seed for _, config in found] == [0] * 4 + [1] * 4
        assert {config.rounds for _, config in found} == {3}

    @pytest.mark.parametrize("both", ["moon+uscc", ["moon", "uscc"], {"moon": {}, "uscc": {}}])
    def test_a_combination_of_plugins_is_one_value(self, both):
        found = cells(grid={"plugin": ["fedavg", both]}, set={"uscc.epochs": 5})
        assert [dict(config.plugins) for _, config in found] == [{"fedavg": {}}, {"moon": {}, "uscc": {"epochs": 5}}]

    def test_an_axis_of_one_plugins_option_leaves_the_others_alone(self):
        found = cells(grid={"plugin": ["fedavg", "moon", {"moon": {"temperature": 2.0}}], "moon.mu": [1, 5]})
        assert [label for label, _ in found] == [
            "fedavg seed=0",
            "moon moon.mu=1 seed=0",
            "moon moon.mu=5 seed=0",
            "moon moon.temperature=2.0 moon.mu=1 seed=0",
            "moon moon.temperature=2.0 moon.mu=5 seed=0",
        ]

    def test_a_case_is_options_that_go_together(self):
        found = cells(
            base={"rounds": 3, "lr": 0.1},
            cases=[
                {"dataset": "digits", "alpha": 0.1, "moon.mu": 5},
                {"dataset": "digits", "alpha": 0.5, "rounds": 4},
            ],
            grid={"plugin": ["fedavg", "moon"]},
            seeds=[7],
        )
        assert [label for label, _ in found] == [
            "fedavg alpha=0.1 rounds=3 seed=7",
            "moon moon.mu=5 alpha=0.1 rounds=3 seed=7",
            "fedavg alpha=0.5 rounds=4 seed=7",
            "moon alpha=0.5 rounds=4 seed=7",
        ]
        assert {config.lr for _, config in found} == {0.1}
        spec = SweepSpec.create({"cases": [{"plugin": "moon"}, {"plugin": "fedcd", "local-epochs": 2}]})
        assert SweepSpec.create(yaml.safe_load(spec.as_yaml())) == spec
        assert [dict(config.plugins) for _, config in spec.cells()] == [{"moon": {}}, {"fedcd": {}}]
        changed = override(SweepSpec(cases=[{"alpha": 0.1, "rounds": 2}]), {}, ["alpha=1,2"], None, [])
        assert [(config.alpha, config.rounds) for _, config in changed.cells()] == [(1, 2), (2, 2)]

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"cases": [{"alpha": 1}, {"alhpa": 1}]}, ("case 2", "'alhpa'", "'alpha'")),
            ({"cases": [{"alpha": 1}], "grid": {"alpha": [2]}}, ("case 1", "alpha", "grid")),
            ({"cases": [{"seed": 1}]}, ("--seeds",)),
            ({"cases": [{"moon.mu": 1}]}, ("'moon'",)),
            ({"gird": {}}, ("'gird'", "'grid'")),
            ({"alpha": 0.1}, ("'alpha'", "base", "grid")),
            ({"base": {"rouns": 1}}, ("'rouns'", "'rounds'")),
            ({"base": {"seed": 1}}, ("--seeds",)),
            ({"grid": {"alhpa": [1]}}, ("grid", "'alhpa'", "'alpha'")),
            ({"grid": {"workers": [1, 2]}}, ("workers",)),
            ({"grid": {"seed": [1, 2]}}, ("--seeds",)),
            ({"grid": {"alpha": []}}, ("'alpha'",)),
            ({"base": {"alpha": 1}, "grid": {"alpha": [1]}}, ("alpha", "grid")),
            ({"grid": {"alpha": [-1]}}, ("--alpha", -1)),
            ({"grid": {"plugin": ["fedavg"], "moon.mu": [1]}}, ("'moon'",)),
            ({"set": {"moon.mu": 1}}, ("'moon'",)),
            ({"set": {"moon": 1}}, ("plugin.option=value",)),
            ({"seeds": 0}, (1,)),
            ({"seeds": []}, ("seeds", 1)),
        ],
    )
    def test_what_cannot_work_is_refused_with_its_name(self, values, named):
        with raises(ConfigError, *named):
            cells(**values)

    def test_flags_override_the_file(self, tmp_path):
        file = tmp_path / "s.yaml"
        file.write_text(yaml.safe_dump({"base": {"rounds": 9, "lr": 0.1}, "grid": {"plugin": "moon"}, "seeds": [3]}))
        spec = override(read_spec(file), {"rounds": 2}, ["plugin=fedavg,fedcd", "lr=0.2,0.3"], "2", ["fedcd.xi=0.4"])
        assert spec.grid == {"plugins": ["fedavg", "fedcd"], "lr": [0.2, 0.3]}
        assert (spec.base, spec.seeds, spec.settings) == ({"rounds": 2}, [0, 1], {"fedcd.xi": 0.4})
        assert SweepSpec.create(yaml.safe_load(spec.as_yaml())) == spec

    @pytest.mark.parametrize(
        ("grid", "settings", "named"),
        [
            (["alpha=0.1", "lr=0.1", "alpha=0.5"], [], "--grid alpha"),
            (["batch-size=8", "batch_size=16"], [], "--grid batch_size"),
            (["plugin=moon"], ["moon.mu=1", "moon.mu=5"], "--set moon.mu"),
        ],
    )
    def test_a_name_that_is_given_twice_is_refused(self, grid, settings, named):
        """The last was taken: a sweep over alpha 0.1 and 0.5 had runs of 0.5 alone."""
        with raises(ConfigError, named, "twice"):
            override(SweepSpec(), {}, grid, None, settings)

    def test_texts_of_the_command_line(self):
        assert parse_axis("plugin=fedavg,{moon: {mu: 1, temperature: 2}},a+b") == (
            "plugin",
            ["fedavg", {"moon": {"mu": 1, "temperature": 2}}, "a+b"],
        )
        assert parse_axis("dataset=hf:a?label=y,digits") == ("dataset", ["hf:a?label=y", "digits"])
        assert parse_axis('model="a,b",module:net.Net,1e-3,-1,') == ("model", ["a,b", "module:net.Net", "1e-3", -1])
        assert (parse_seeds("3"), parse_seeds("7,"), parse_seeds("0,7")) == ([0, 1, 2], [7], [0, 7])
        for wrong in ("plugin", "=1", "alpha="):
            with raises(ConfigError, "AXIS=VALUE"):
                parse_axis(wrong)
        with raises(ConfigError):
            parse_seeds("three")


class TestPlan:
    def test_names_are_checked_before_anything_runs(self, tmp_path):
        for grid, says in (
            ({"plugin": ["fedavg", "mooon"]}, "Did you mean 'moon'"),
            ({"plugin": ["moon"], "moon.mmu": [1]}, "mmu"),
            ({"dataset": ["digits", "digit"]}, "Did you mean 'digits'"),
            ({"model": ["mlp", "mpl"]}, "Did you mean 'mlp'"),
        ):
            with raises(ConfigError, says):
                run_sweep(SweepSpec(grid=grid), tmp_path / "sweep")
        assert not (tmp_path / "sweep").exists()

    def test_defaults_written_out_are_the_same_run(self):
        plain, written = (plan_sweep(SweepSpec(grid={"plugin": [p]})) for p in ("moon", {"moon": {"mu": 1.0}}))
        assert digest(plain[0][1]) == digest(written[0][1])
        assert digest(RunConfig(workers=0, out="x")) == digest(RunConfig(plugins=["fedavg"]))
        assert digest(RunConfig(seed=1)) != digest(RunConfig()) != digest(RunConfig(plugins=["moon", "uscc"]))

    def test_methods_of_one_seed_see_the_same_clients_and_weights(self):
        """The layers that they have in common; with a projection head in all, every weight."""
        methods = ["fedavg", "fedprox", "moon", "fedcme"]
        base = {"clients": 4, "projection": True}
        spec = SweepSpec(base=base, grid={"plugin": methods, "alpha": [0.1, 0.5]}, seeds=2)
        dataset = load_dataset("digits")
        hashes, weights = {}, {}
        for _, config in plan_sweep(spec):
            config, _ = resolve_config(config)
            dealt = hashes.setdefault((config.alpha, config.seed), set())
            dealt.add(resolve_partition(config, dataset).sha256)
            model = Setup.build(config, dataset).model.state_dict()
            first = weights.setdefault(config.seed, model)
            assert first.keys() == model.keys()
            assert all(first[name].equal(model[name]) for name in model), config.plugins
        assert all(len(found) == 1 for found in hashes.values())
        assert len(set.union(*hashes.values())) == 4
        assert not weights[0]["classifier.weight"].equal(weights[1]["classifier.weight"])


class TestDirectory:
    def test_a_run_keeps_its_name_when_others_are_added(self, tmp_path):
        directory = SweepDirectory(tmp_path / "s")
        first = directory.add("", SweepSpec(grid={"alpha": [0.1]}).cells())
        both = directory.add("", SweepSpec(grid={"alpha": [0.1, 0.5], "lr": [0.02]}).cells())
        assert both[0] == first[0]
        assert list(directory.plan()) == both
        assert [config.alpha for config in directory.plan().values()] == [0.1, 0.5]

    def test_equal_labels_are_different_runs(self, tmp_path):
        cells = [("same", RunConfig(alpha=alpha)) for alpha in (0.1, 0.5)]
        assert len(set(SweepDirectory(tmp_path / "s").add("", cells))) == 2

    def test_a_long_label_is_cut_and_its_plan_is_read_again(self, tmp_path):
        directory = SweepDirectory(tmp_path / "s")
        (name,) = directory.add("", [("option=1_" * 40, RunConfig())])
        assert 100 < len(name) < 120
        assert list(directory.plan()) == [name]

    def test_standing(self, tmp_path):
        directory = SweepDirectory(tmp_path)
        folder = directory.run_directory("a")
        assert directory.standing("a") == "waiting"
        folder.mkdir(parents=True)
        (folder / "partition.json").touch()
        assert directory.standing("a") == "waiting"  # killed before it was a run
        (folder / "config.yaml").touch()
        assert directory.standing("a") == "stopped"
        (folder / "summary.json").write_text('{"rounds": 3}')
        assert directory.standing("a") == directory.standing("a", 3) == "finished"
        assert directory.standing("a", 4) == "stopped"  # it was to have fewer rounds

    def test_more_rounds_go_to_the_run_that_is_there_and_fewer_to_a_new_one(self, tmp_path):
        directory = SweepDirectory(tmp_path / "s")

        def add(**base):
            return directory.add("", SweepSpec(base=base, grid={"plugin": ["fedavg", "moon"]}).cells())

        first = add(rounds=3)
        assert add(rounds=5) == first
        assert [directory.plan()[name].rounds for name in first] == [5, 5]
        shorter = add(rounds=3)
        assert not set(shorter) & set(first)
        assert add(rounds=4) == shorter
        assert add(rounds=5) == first
        assert set(add(rounds=5, lr_schedule="cosine")).isdisjoint(add(rounds=6, lr_schedule="cosine"))

    @pytest.mark.parametrize(
        ("plugin", "follows"),
        [
            ({"fedproc": {}}, True),
            ({"fedproc": {"schedule_rounds": 100}}, False),
            ({"fedproc": {"alpha": 0.5}}, False),
            ({"fedeccr": {}}, True),
            ({"fedcd": {}}, True),
            ({"moon": {}}, False),
        ],
    )
    def test_more_rounds_of_a_method_that_follows_them_are_a_new_run(self, tmp_path, plugin, follows):
        directory = SweepDirectory(tmp_path / "s")
        (three,) = directory.add("", cells(base={"rounds": 3, "plugins": plugin}))
        (four,) = directory.add("", cells(base={"rounds": 4, "plugins": plugin}))
        rounds = {name: config.rounds for name, config in directory.plan().items()}
        assert rounds == ({three: 3, four: 4} if follows else {three: 4})

    def test_a_run_that_is_asked_for_keeps_its_rounds(self, tmp_path):
        directory = SweepDirectory(tmp_path / "s")
        (five,) = directory.add("", cells(base={"rounds": 5}))
        ten, same = directory.add("", cells(grid={"rounds": [10, 5]}))
        assert (same, {name: config.rounds for name, config in directory.plan().items()}) == (five, {five: 5, ten: 10})

    def test_a_planned_run_gets_the_new_options_without_effect_on_its_results(self, tmp_path):
        directory = SweepDirectory(tmp_path / "s")
        (name,) = directory.add("", cells(base={"data_dir": "old"}))
        assert directory.add("", cells(base={"data_dir": "new", "metrics": ["ece"], "checkpoint_every": 5})) == [name]
        config = directory.plan()[name]
        assert (config.data_dir.name, config.metrics, config.checkpoint_every) == ("new", ["ece"], 5)

    def test_a_folder_with_something_else_is_left_alone(self, tmp_path):
        (tmp_path / "thesis.tex").touch()
        with raises(RunDirectoryError):
            SweepDirectory(tmp_path).add("", SweepSpec().cells())
        with raises(RunDirectoryError, "sweep.json"):
            run_sweep(None, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize(
        "content",
        ["{", "[]", '{"format": "fedcore-sweep-1"}', '{"format": "fedcore-sweep-9", "runs": {}}'],
    )
    def test_a_damaged_plan_is_said(self, tmp_path, content):
        (tmp_path / "sweep.json").write_text(content)
        with pytest.raises(RunDirectoryError, match=r"sweep\.json (is damaged|has format 'fedcore-sweep-9')"):
            SweepDirectory(tmp_path).plan()

    def test_an_unknown_option_in_the_plan_is_said(self, tmp_path):
        runs = {"a": {"rounds": 1, "aplha": 1}}
        (tmp_path / "sweep.json").write_text(json.dumps({"format": "fedcore-sweep-1", "runs": runs}))
        with raises(UnknownNameError, "'alpha'", "sweep.json"):
            SweepDirectory(tmp_path).plan()

    def test_one_sweep_at_a_time(self, tmp_path):
        directory = SweepDirectory(tmp_path)
        with directory.lock(), raises(RunDirectoryError), SweepDirectory(tmp_path).lock():
            pass
        with directory.lock():
            pass

    def test_where_nothing_can_be_locked_a_sweep_works(self, tmp_path, monkeypatch):
        def flock(descriptor, operation):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("fcntl.flock", flock)
        with SweepDirectory(tmp_path).lock(), SweepDirectory(tmp_path).lock():
            nothing_is_locked = True
        assert nothing_is_locked


SLEEP = 'import sys, time; print(\'{"event": "up"}\', flush=True); [time.sleep(0.1) for _ in range(600)]'
"""A signal that comes as a sleep is about to begin is handled after it: many short ones."""


def python(arguments, log):
    """Start a program's process."""
    command = [sys.executable, "-c", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True)


class TestProcesses:
    """Jobs are small Python programs."""

    def run(self, tmp_path, programs, parallel, listen=lambda *event: None):
        jobs = [Job(name, [code], tmp_path / f"{name}.log") for name, code in programs.items()]
        outcomes, interrupted = run_jobs(jobs, parallel, listen, python)
        assert [outcome.name for outcome in outcomes] == list(programs)
        return {outcome.name: outcome for outcome in outcomes}, interrupted

    def test_never_more_at_a_time_than_asked_for_and_in_order(self, tmp_path):
        under_way, most, started = set(), 0, []

        def listen(name, event, details):
            nonlocal most
            if event == "start":
                started.append(name)
                under_way.add(name)
                most = max(most, len(under_way))
            elif event in ("finished", "failed"):
                under_way.discard(name)

        found, interrupted = self.run(tmp_path, dict.fromkeys("abcde", "import time; time.sleep(0.1)"), 2, listen)
        assert (most, started, interrupted) == (2, list("abcde"), False)
        assert {outcome.status for outcome in found.values()} == {"finished"}

    def test_a_failure_does_not_stop_the_others(self, tmp_path):
        programs = {
            "says": 'print(\'{"event": "error", "message": "no data"}\'); exit(2)',
            "silent": "import sys; print('why', file=sys.stderr); exit(7)",
            "killed": "import os; os.kill(os.getpid(), 9)",
            "noise": "print('not json'); print('{\"event')",
            "good": "",
        }
        found, _ = self.run(tmp_path, programs, 1)
        assert [outcome.status for outcome in found.values()] == ["failed"] * 3 + ["finished"] * 2
        assert found["says"].message == "no data"
        assert "exit code 7; see" in found["silent"].message
        assert (tmp_path / "silent.log").read_text() == "why\n"
        assert "SIGKILL (out of memory? lower --parallel)" in found["killed"].message

    def test_ctrl_c_stops_those_under_way_and_starts_no_other(self, tmp_path):
        def listen(name, event, details):
            if event == "up":
                raise KeyboardInterrupt  # as the handler of SIGINT does

        # A shell's background jobs ignore SIGINT, and their children with them.
        sleep = "import signal\nsignal.signal(2, signal.default_int_handler)\n" + SLEEP
        began = time.monotonic()
        found, interrupted = self.run(tmp_path, {"quick": "", "long": sleep, "next": sleep}, 1, listen)
        assert interrupted
        assert [outcome.status for outcome in found.values()] == ["finished", "stopped", "waiting"]
        assert time.monotonic() - began < 30

    def test_a_second_ctrl_c_kills(self, tmp_path):
        presses = []
        deaf = 'import signal, os\nsignal.signal(2, lambda *a: print(\'{"event": "deaf"}\', flush=True))\n' + SLEEP

        def listen(name, event, details):
            if event in ("up", "deaf"):
                presses.append(event)
                raise KeyboardInterrupt

        found, interrupted = self.run(tmp_path, {"deaf": deaf}, 1, listen)
        assert (interrupted, presses, found["deaf"].status) == (True, ["up", "deaf"], "stopped")

    def test_an_error_of_the_listener_leaves_no_process_behind(self, tmp_path):
        pids = []

        def listen(name, event, details):
            pids.append(details["pid"]) if event == "pid" else None
            if event == "pid":
                raise RuntimeError("full disk")

        code = 'import os, time; print(\'{"event": "pid", "pid": %d}\' % os.getpid(), flush=True); time.sleep(60)'
        with raises(RuntimeError):
            self.run(tmp_path, {"a": code}, 1, listen)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and os.path.exists(f"/proc/{pids[0]}"):
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pids[0]}")


def test_a_class_of_a_module_is_named_without_the_module() -> None:
    values = {"base": {"plugins": ["module:mine.Near"]}, "grid": {"Near.mu": [1, 2]}, "set": {"Near.a": 3}}
    assert [(name, config.plugins) for name, config in SweepSpec.create(values).cells()] == [
        (f"Near Near.mu={mu} seed=0", {"module:mine.Near": {"a": 3, "mu": mu}}) for mu in (1, 2)
    ]
