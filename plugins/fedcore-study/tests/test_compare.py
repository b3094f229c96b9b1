"""Comparisons of run directories that are written here, so that every expected number is known."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from dataclasses import astuple, replace
from pathlib import Path

import pytest

import fedcore
import fedcore_study
from fedcore import ConfigError, RunConfig, RunDirectoryError, UnknownNameError
from fedcore.tools import saved
from fedcore_report.build import build
from fedcore_study import tables
from fedcore_study.comparisons import formats
from fedcore_study.comparisons.compare import compare_runs
from fedcore_study.comparisons.costs import seconds_per_round
from fedcore_study.comparisons.fairness import Spread
from fedcore_study.comparisons.fairness import headings as headings_of_spread
from fedcore_study.comparisons.figures import Difference, Figure, paired_difference
from fedcore_study.comparisons.findings import verdict
from fedcore_study.comparisons.measures import ACCURACY, Measure, direction
from fedcore_study.comparisons.records import find_runs, read_run
from fedcore_study.comparisons.tuned import at_which
from fedcore_study.sweeps.directory import SweepDirectory
from fedcore_study.words import named
from tests.made_runs import make as make
from tests.made_runs import seal
from tests.sentences import raises, refused


def headings(comparison, block):
    return [column.heading for column in formats.table_columns(comparison, block)]


def cells(comparison, block, row):
    return [column.cell(row) for column in formats.table_columns(comparison, block)]


def join(folders, **options):
    notes = []
    found = compare_runs(find_runs(folders, notes.append), warn=notes.append, **options)
    return found, notes


class TestFigures:
    def test_mean_and_sample_deviation(self):
        assert Figure.of([1.0, 2.0, 6.0]) == Figure(3.0, math.sqrt(7.0), 3)
        assert Figure.of([2.0]) == Figure(2.0, None, 1)
        assert Figure.of([]) is None

    def test_interval_by_students_t(self):
        """Differences 1, 2, 3: mean 2, deviation 1; t(0.975, 2) = 4.302653 from the tables."""
        found = paired_difference({0: 11.0, 1: 22.0, 2: 33.0, 9: 99.0}, {2: 30.0, 1: 20.0, 0: 10.0, 7: -99.0})
        assert (found.mean, found.n) == (2.0, 3)
        assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
        assert found.low + found.high == pytest.approx(4.0)
        narrow = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0}, confidence=0.9)
        assert narrow.high - 2.0 == pytest.approx(2.919986 / math.sqrt(3), rel=1e-6)

    def test_few_pairs(self):
        assert paired_difference({0: 1.0}, {1: 1.0}) is None
        one = paired_difference({0: 3.0, 1: 5.0}, {0: 1.0})
        assert (one.mean, one.low, one.high, one.n) == (2.0, None, None, 1)
        two = paired_difference({0: 3.0, 1: 5.0}, {0: 2.0, 1: 4.0})
        assert (two.mean, two.low, two.high, two.n) == (1.0, None, None, 2)


class TestComparison:
    def test_mean_difference_and_costs(self, make):
        folders = [make([], seed, [0.3, 0.5, 0.6 + seed / 10]) for seed in (0, 1)]
        folders += [make(["moon"], seed, [0.5, 0.7, 0.8 + seed / 5]) for seed in (0, 1)]
        found, notes = join(folders, target=0.65)
        (block,) = found.blocks
        fedavg, moon = block.rows
        assert (fedavg.label, moon.label, block.baseline, notes) == ("fedavg", "moon", "fedavg", [])
        assert fedavg.summary.mean == pytest.approx(0.65)
        assert moon.summary.std == pytest.approx(math.sqrt(0.02))
        assert moon.difference.mean == pytest.approx(0.25)
        assert fedavg.difference is None
        assert moon.rounds == Figure(2.0, 0.0, 2)
        assert moon.bytes == Figure(600.0, 0.0, 2)
        assert (fedavg.rounds, fedavg.bytes) == (Figure(3.0, None, 1), Figure(900.0, None, 1))  # seed 0 never does
        assert fedavg.costs["s/round"] == Figure(2.0, math.sqrt(0.5), 2)
        assert cells(found, block, fedavg)[-3:-1] == ["3.0 (1/2)", "0.00 (1/2)"]

    def test_a_correction_after_training_counts_with_its_bytes(self, make):
        found, _ = join([make(["uscc"], 0, [0.2, 0.3], final=0.9)], target=0.8)
        (row,) = found.blocks[0].rows
        assert (row.summary.mean, row.rounds.mean, row.bytes.mean) == (0.9, 2, 650)

    def test_a_run_that_ended_early_counts_the_rounds_it_took(self, make):
        """As with --patience; the target is reached in the last evaluation alone."""
        folders = [
            make([], seed, [0.2, 0.3, 0.3][seed:], final=0.9, rounds=rounds) for seed, rounds in enumerate((9, 9))
        ]
        found, _ = join(folders, target=0.8)
        assert found.blocks[0].rows[0].rounds.mean == 2.5
        early = "runs ended early (--patience, on_round): fedavg (2 of 2, after 2 to 3 of 9 rounds). "
        assert [note.startswith(early) for note in found.notes] == [True]
        assert join(folders, round=2)[0].notes == []

    @pytest.mark.parametrize(
        "other", [{"dataset": "mnist"}, {"alpha": 0.1}, {"rounds": 9}, {"labels": "M", "dealt": "x"}, {"lr": 0.1}]
    )
    def test_other_data_partitions_and_settings_are_never_averaged(self, make, other):
        found, _ = join([make([], 0, [0.2]), make([], 1, [0.4], **other)])
        assert [row.summary.mean for block in found.blocks for row in block.rows] == [0.2, 0.4]
        assert len(found.blocks) == 2
        name = "labels" if "labels" in other else next(iter(other))
        assert all(name in block.settings for block in found.blocks)
        assert name not in found.common

    def test_how_a_run_was_executed_makes_no_difference(self, make):
        found, _ = join([make([], 0, [0.2], workers=0), make(["fedavg"], 1, [0.4], workers=3, checkpoint_every=5)])
        assert found.blocks[0].rows[0].summary.n == 2

    def test_the_same_run_twice_counts_once_and_an_equal_one_is_refused(self, make):
        one = make([], 0, [0.2])
        assert join([one, one / ".." / one.name])[0].blocks[0].rows[0].summary.n == 1
        with raises(ConfigError):
            join([one, make([], 0, [0.2])])

    def test_other_clients_under_the_same_settings_are_refused(self, make):
        with raises(ConfigError):
            join([make([], 0, [0.2]), make(["moon"], 0, [0.3], dealt="otherwise")])

    def test_methods_are_told_apart_by_their_options(self, make):
        shared = {"temperature": 0.5}
        folders = [make({"moon": {"mu": mu, **shared}, "uscc": {}}, 0, [mu / 10]) for mu in (1, 5)]
        found, _ = join(folders, baseline="moon+uscc (moon.mu=1)")
        assert [row.label for row in found.blocks[0].rows] == ["moon+uscc (moon.mu=1)", "moon+uscc (moon.mu=5)"]
        assert found.blocks[0].rows[1].difference.mean == pytest.approx(0.4)
        alone = [make({"my-method": {"strength": s, "other": 1}}, 0, [s]) for s in (0.01, 0.1)]
        labels = [row.label for row in join(alone)[0].blocks[0].rows]
        assert labels == ["my-method (strength=0.01)", "my-method (strength=0.1)"]
        with raises(UnknownNameError, "'mon'", "moon+uscc (moon.mu=5)"):
            join(folders, baseline="mon")

    def test_a_site_that_is_left_out_has_its_name_in_titles(self, make):
        sites = {"client_test_fraction": 0.2, "partition": "natural"}
        folders = [
            make([plugin], 0, [0.1], unseen_clients=left, **sites)
            for plugin in ("moon", "fedavg")
            for left in (["Basel"], ["Genf", "Zug"])
        ]
        found, _ = join(folders)
        assert [named(block.settings) for block in found.blocks] == ["unseen_clients Basel", "unseen_clients Genf, Zug"]

    def test_rows_by_another_option(self, make):
        folders = [make([plugin], 0, [0.1], lr=lr) for plugin in ("moon", "fedcd") for lr in (0.1, 0.2)]
        found, _ = join(folders, by=["lr"], baseline="0.1")
        assert [block.settings for block in found.blocks] == [{"plugins": "moon"}, {"plugins": "fedcd"}]
        assert [row.label for row in found.blocks[0].rows] == ["0.1", "0.2"]
        assert [named(block.settings) for block in found.blocks] == ["plugins moon", "plugins fedcd"]
        both, _ = join(folders, by=["plugin", "lr"])
        assert [row.label for row in both.blocks[0].rows][:2] == ["moon, lr=0.1", "moon, lr=0.2"]
        one = make([], 0, [0.2], lr=0.1)
        (block,) = join([*folders, one], by=["plugin", "lr"])[0].blocks
        assert (block.baseline, len([row for row in block.rows if row.difference])) == ("fedavg, lr=0.1", 4)
        found, _ = join([*folders, one, make([], 0, [0.2], lr=0.2)], by=["plugin", "lr"])
        assert found.blocks[0].baseline is None
        (note,) = found.notes
        assert note == "2 rows are of fedavg, so none is the baseline; name it: --baseline 'fedavg, lr=0.1'"
        with raises(UnknownNameError, "'x'", "Known: 'fedavg, lr=0.1', 'fedcd, lr=0.1', "):
            join([*folders, one], by=["plugin", "lr"], baseline="x")
        for wrong in ("seed", "out", "plugni"):
            with raises(UnknownNameError, "--by", f"'{wrong}'"):
                join(folders, by=[wrong])

    def test_tables_are_told_apart_by_the_options_of_their_method(self, make):
        folders = [make({"moon": {"mu": mu, "t": 1}}, 0, [0.1], lr=lr) for mu in (1, 5) for lr in (0.1, 0.2)]
        folders += [make({"moon": {"mu": 1, "t": 1}}, 1, [0.1], lr=0.1), make([], 0, [0.1], lr=0.1)]
        found, _ = join(folders, by=["lr"])
        titles = ["plugins moon (mu=1)", "plugins moon (mu=5)", "plugins fedavg"]
        assert [table.title for table in formats.printed([found])] == titles
        rows = [(row["plugins"], row["row"]) for row in formats.plain_rows(found)]
        assert rows[:3] == [("moon (mu=1)", "0.1"), ("moon (mu=1)", "0.2"), ("moon (mu=5)", "0.1")]
        (note,) = found.notes
        assert note.startswith("plugins moon (mu=1): the rows have different seeds")
        sections = build(find_runs(folders, print), [], title="t", by=["lr"], points=0).sections
        assert [section.title for section in sections] == titles

    def test_runs_with_other_clients_are_no_pairs(self, make):
        found, _ = join([make([], 0, [0.1], alpha=a) for a in (0.1, 0.5)], by=["alpha"], baseline="0.1")
        assert [row.difference for row in found.blocks[0].rows] == [None, None]
        assert found.blocks[0].findings[-1] == "No seed with the same clients as 0.1: 0.5."

    def test_data_sets_can_be_rows_if_one_asks(self, make):
        found, _ = join([make([], 0, [0.1]), make([], 0, [0.2], dataset="mnist", labels="M")], by=["dataset"])
        assert [row.label for row in found.blocks[0].rows] == ["digits", "mnist"]

    def test_a_seed_without_its_pair_is_said(self, make):
        folders = [make([], 0, [0.1]), *(make(["moon"], seed, [0.2 + seed]) for seed in (0, 1))]
        found, _ = join(folders)
        assert found.blocks[0].rows[1].difference.mean == pytest.approx(0.1)
        assert found.notes[0] == "moon: only 1 of 2 seeds have a pair in fedavg"
        assert "Note: moon: only 1 of 2 seeds have a pair in fedavg." in formats.as_markdown([found])
        found, _ = join([*folders, make(["moon"], 0, [0.3], lr=9.0)], baseline="fedavg")
        said = [note for note in found.notes if "baseline" in note or "pair" in note]
        assert said == [
            "lr 0.02: moon: only 1 of 2 seeds have a pair in fedavg",
            "lr 9.0: no run of the baseline 'fedavg', hence no differences",
        ]

    def test_unfinished_runs_are_left_out_or_all_are_compared_at_a_round(self, make):
        stopped = make(["moon"], 0, [0.5, 0.6], finished=False, rounds=3)
        done = make([], 0, [0.1, 0.2, 0.9])
        found, notes = join([done, stopped])
        assert [row.label for row in found.blocks[0].rows] == ["fedavg"]
        assert notes == [f"{stopped} is not finished (2 of 3 rounds) and is left out"]
        at_two, notes = join([done, stopped], round=2, target=0.6)
        assert [row.summary.mean for row in at_two.blocks[0].rows] == [0.2, 0.6]
        assert [row.rounds for row in at_two.blocks[0].rows] == [None, Figure(2, None, 1)]  # 0.9 came later
        assert notes == []
        with raises(ConfigError, "--round", "2"):
            join([stopped])
        longer = make(["moon"], 0, [0.5, 0.6], finished=False, rounds=9)
        apart, (note,) = join([done, longer], round=2)
        assert len(apart.blocks) == 2
        assert note.startswith("runs with other --rounds stand in tables of their own, also after round 2")
        together, notes = join([done, longer], round=2, by=["plugin", "rounds"])
        assert ([row.label for row in together.blocks[0].rows], notes) == (["fedavg, rounds=3", "moon, rounds=9"], [])
        assert together.blocks[0].rows[1].difference.mean == pytest.approx(0.4)

    def test_methods_that_each_have_a_table_are_told_how_to_share_one(self, make):
        folders = [make([], 0, [0.1], momentum=0.9), make(["moon"], 0, [0.4], momentum=0.0)]
        apart, (note,) = join(folders)
        assert len(apart.blocks) == 2
        assert "differ in momentum" in note
        assert note.endswith("--tuned momentum")
        together, _ = join(folders, tuned=["momentum"])
        assert [row.label for row in together.blocks[0].rows] == ["fedavg", "moon"]
        assert join([*folders, make(["moon"], 0, [0.4], momentum=0.9)])[1] == []  # a table has two of them
        assert join([folders[0], make(["moon"], 0, [0.4], momentum=0.9, alpha=0.1)])[1] == []  # other data

    def test_protocols(self, make):
        folders = [make([], 0, [0.1]), make(["fedper"], 0, [0.4], protocol="personal")]
        found, notes = join(folders, protocol="personal")
        assert [row.label for row in found.blocks[0].rows] == ["fedper"]
        assert "no figures for protocol 'personal'" in notes[0]
        with raises(ConfigError, "--protocol"):
            join(folders[1:])
        with raises(UnknownNameError, "'personal'"):
            join(folders, protocol="persnal")

    @pytest.mark.parametrize("wrong", [{"target": 80.0}, {"target": 0.0}, {"confidence": 95.0}])
    def test_percentages_are_not_taken_for_fractions(self, make, wrong):
        with raises(ConfigError, *(f"--{option} is {value}" for option, value in wrong.items())):
            join([make([], 0, [0.1])], **wrong)


class TestRecords:
    def test_a_half_written_line_is_read_up_to_with_a_warning(self, make):
        folder = make([], 0, [0.1, 0.2, 0.3])
        file = folder / "metrics.jsonl"
        file.write_bytes(file.read_bytes()[:-20])
        notes = []
        run = read_run(folder, notes.append)
        assert [point.value for point in run.curve("global")] == [0.1, 0.2]
        assert notes == [f"{file}: line 3 is half written; read up to it"]

    def test_a_line_without_times_does_not_count_as_one(self, make):
        folder = make([], 0, [0.1, 0.2])
        expected = seconds_per_round(read_run(folder, pytest.fail))
        first, second = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        lines = [first, {**second, "time": None}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        seal(folder)
        times = [line["time"] for line in (first, second)]
        assert expected == sum(time["round"] + time.get("evaluation", 0.0) for time in times) / 2
        alone = seconds_per_round(read_run(folder, pytest.fail))
        assert alone == times[0]["round"] + times[0].get("evaluation", 0.0)

    @pytest.mark.parametrize("broken", ["{}}", '{"round": 1}', "[1]", '{"round": 1, "bytes": 3}', "\x00", "\ufffd"])
    def test_a_damaged_line_is_read_up_to_with_a_warning(self, make, broken):
        folder = make([], 0, [0.1, 0.2, 0.3])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join([lines[0], broken, lines[2]]) + "\n")
        notes = []
        assert len(read_run(folder, notes.append).rounds) == 1
        assert "line 2 is damaged" in notes[0]

    def test_rounds_without_evaluation_and_lines_after_training(self, make):
        folder = make([], 0, [None, 0.2])
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"phase": "post_train", "bytes": {}}\n')
        seal(folder)
        (point,) = read_run(folder, pytest.fail).curve("global")
        assert (point.rounds, point.bytes) == (2, 600)

    def test_a_damaged_summary_makes_the_run_unfinished(self, make):
        folder = make([], 0, [0.2])
        (folder / "summary.json").write_text('{"metrics": {"glo')
        notes = []
        assert not read_run(folder, notes.append).finished
        assert "counts as not finished" in notes[0]

    def test_an_empty_folder_beside_runs_is_left_out(self, make, tmp_path):
        """Such as ``runs/*`` has where a run was killed before it began."""
        (tmp_path / "empty").mkdir()
        notes = []
        assert len(find_runs([tmp_path / "empty", make([], 0, [0.2])], notes.append)) == 1
        assert notes == [f"{tmp_path / 'empty'} is empty and left out: its run was killed before it began"]

    def test_what_is_no_run_is_refused(self, make, tmp_path):
        (tmp_path / "empty").mkdir()
        for name, says in (("empty", "neither a run nor a sweep"), ("none", "does not exist")):
            with raises(RunDirectoryError, says):
                find_runs([tmp_path / name], pytest.fail)
        folder = make([], 0, [0.2])
        with raises(RunDirectoryError):
            find_runs([folder.parent], pytest.fail)
        (folder / "partition.json").write_text("{}")
        with raises(RunDirectoryError, "partition.json"):
            read_run(folder, pytest.fail)
        (folder / "config.yaml").write_text("rounds: 1\n")
        with raises(RunDirectoryError, "config.yaml"):
            read_run(folder, pytest.fail)

    def test_one_run_that_cannot_be_read_comes_with_the_way_to_the_others(self, make):
        """It was said that config.yaml was changed, and how to start a new run."""
        folders = make([], 0, [0.2]), make([], 1, [0.3])
        (folders[1] / "config.yaml").write_text("stackk: 4\n")
        with raises(RunDirectoryError, "'stackk'", f"move {folders[1]} away"):
            find_runs(folders, pytest.fail)
        with raises(UnknownNameError, "'stackk'") as caught:
            find_runs(folders[1:], pytest.fail)
        assert "move" not in str(caught.value)

    def test_a_run_that_has_just_begun(self, make):
        folder = make([], 0, [], finished=False, rounds=3)
        with raises(ConfigError):
            join([folder])

    def test_a_sweeps_runs(self, make, tmp_path):
        sweep = SweepDirectory(tmp_path / "s")
        planned = {"one": RunConfig(rounds=1), "two": RunConfig(seed=1), "three": RunConfig(seed=2)}
        one, two, three = sweep.add("", planned.items())
        make([], 0, [0.4]).rename(sweep.run_directory(one))
        for name in (one, three):  # the first was tried again
            sweep.keep_failure(name, "diverged")
        notes = []
        assert [run.path.name for run in find_runs([sweep.path], notes.append)] == [one]
        assert notes == [
            f"runs that failed: {three}. The first: diverged",
            f"planned runs that have not begun are left out: 1. The first: {two}",
        ]


class TestFormats:
    @pytest.fixture
    def found(self, make):
        folders = [make([], seed, [0.5 + seed / 10], alpha=alpha) for seed in (0, 1, 2) for alpha in (0.1, 0.5)]
        folders += [make(["moon"], seed, [0.6], alpha=alpha) for seed in (0, 1, 2) for alpha in (0.1, 0.5)]
        return join(folders)[0]

    def test_markdown(self, found):
        lines = formats.as_markdown([found]).splitlines()
        assert lines[0] == "**alpha 0.1**"
        assert lines[2] == "| method | seeds | accuracy % | minus fedavg [95 % interval] | p (Holm) | s/round |"
        assert lines[4] == "| fedavg | 3 | 60.00 ± 10.00 | - | - | 2.500 ± 1.000 |"
        assert lines[5] == "| moon | 3 | 60.00 ± 0.00 | +0.00 [-24.84, +24.84] | 1.000 | 2.500 ± 1.000 |"
        assert "dataset digits" in lines[-1]
        assert "alpha" not in lines[-1]

    def test_the_caption_names_all_models_of_the_clients(self, make):
        found, _ = join([make([], 0, [0.5], model="mlp", client_models=["mlp", "module:mine.Net"])])
        assert ", model mlp and Net, partition" in formats.caption([found])

    @pytest.mark.parametrize(("partition", "used"), [("iid", False), ("part.json", False), ("dirichlet", True)])
    def test_alpha_is_named_where_the_partition_uses_it(self, make, partition, used):
        found, _ = join([make([], seed, [0.5], alpha=0.01, partition=partition) for seed in (0, 1)])
        for text in (formats.as_markdown([found]), formats.as_latex([found])):
            assert f"partition {partition}" in text
            assert ("alpha 0.01" in text) is used

    def test_latex_has_no_open_special_character(self, found):
        text = formats.as_latex([found])
        assert r"moon & 3 & 60.00 $\pm$ 0.00 & +0.00 [$-$24.84, +24.84] & 1.000 \\" in text
        assert r"accuracy \%" in text
        assert text.count(r"\begin{tabular}{lrrrr}") == text.count(r"\end{tabular}") == 2
        assert r"\textbf" not in text  # equal means
        assert [f"tab:comparison-{number}" in text for number in (1, 2, 3)] == [True, True, False]

    def test_latex_has_the_best_of_each_column_in_bold(self, make):
        folders = [make([], seed, [0.5, 0.7]) for seed in (0, 1, 2)]
        folders += [make(["moon"], seed, [0.8, 0.8]) for seed in (0, 1, 2)]
        folders += [make(["fedprox"], seed, [0.8 if seed else 0.1, 0.1]) for seed in (0, 1, 2)]  # not all reach it
        text = formats.as_latex([join(folders, target=0.7)[0]])
        row, below = (line for line in text.splitlines() if line.startswith("moon"))
        assert row.split(" & ")[:4] == ["moon", "3", r"\textbf{80.00 $\pm$ 0.00}", "+10.00 (3 seeds)"]
        assert r"\textbf{1.0 $\pm$ 0.0}" in row
        assert below == r"moon & 0.00 $\pm$ 0.00 \\"  # all take 0.00 MB: none is best
        assert text.count(r"\textbf") == 2
        assert r"\label{tab:comparison}" in text
        assert r"\toprule" in text
        depth = 0
        for character in re.sub(r"(?m)^%.*|\\.", "", text):  # every brace is closed
            depth += {"{": 1, "}": -1}.get(character, 0)
            assert depth >= 0
        assert depth == 0

    def test_csv_holds_plain_numbers(self, found):
        rows = list(csv.DictReader(io.StringIO(formats.as_csv([found]))))
        assert [(row["alpha"], row["row"]) for row in rows] == [
            ("0.1", "fedavg"), ("0.1", "moon"), ("0.5", "fedavg"), ("0.5", "moon"),
        ]  # fmt: skip
        assert float(rows[1]["difference_mean"]) == pytest.approx(0)
        assert float(rows[1]["difference_high"]) == pytest.approx(0.248414, abs=1e-6)
        assert (rows[0]["difference_mean"], rows[0]["rounds_n"]) == ("", "0")
        assert (rows[0]["clients_jain_mean"], rows[0]["virtual_seconds_n"]) == ("", "0")

    def test_json_holds_every_seed(self, found):
        blocks = json.loads(formats.as_json([found]))["blocks"]
        assert blocks[0]["rows"][0]["values"] == {"0": 0.5, "1": 0.6, "2": 0.7}
        assert blocks[1]["settings"] == {"alpha": 0.5}


class TestOverClients:
    """Four clients with 20, 40, 60 and 80 %: mean 50, deviation sqrt(500), Jain's index 200^2 / (4 * 12000) = 5/6."""

    def test_the_figures_by_hand(self):
        found = Spread.of(
            {"accuracy": 0.5, "mean": 0.5, "std": math.sqrt(0.05), "worst10": 0.2, "best10": 0.8}, ACCURACY
        )
        assert (found.mean, found.worst, found.best) == (0.5, 0.2, 0.8)
        assert found.variance == pytest.approx(500)
        assert found.jain == pytest.approx(5 / 6)
        assert Spread.of({"mean": 0.3, "std": 0.0}, ACCURACY).jain == 1
        assert Spread.of({"mean": 1 / 4, "std": math.sqrt(3) / 4}, ACCURACY).jain == pytest.approx(
            1 / 4
        )  # of 1, 0, 0, 0
        assert Spread.of({"mean": 0.0, "std": 0.0}, ACCURACY).jain is None

    def test_those_of_a_metric_are_by_its_own_sign(self):
        """Ten hospitals: of an error the worst tenth is the largest."""
        errors = {str(k): (k + 1) / 100 for k in range(10)}
        row = {"accuracy": 0.5, "ece": 0.06, "ece_mean": 0.055, "ece_std": 0.03, "ece_per_client": errors}
        found = Spread.of(row, Measure("ece", -1))
        assert (found.mean, found.std, found.worst, found.best) == (0.055, 0.03, 0.1, 0.01)
        assert Spread.of(row, Measure("ece_mean", -1)) == found
        assert Spread.of(row, Measure("auroc")) == Spread(None, None, None, None)

    @pytest.fixture
    def hospitals(self, make):
        """Two seeds of three hospitals; with the second seed the third one comes first, and it has no AUROC."""
        names = [["North", "South", "East & West"], ["East & West", "North", "South"]]
        auroc = [{"0": 0.9, "1": 0.7}, {"1": 0.7, "2": 0.5}]
        folders = []
        for seed in (0, 1):
            measured = {"per_client": {"0": 0.1, "1": 0.2, "2": 0.3}, "auroc": 0.7, "auroc_per_client": auroc[seed]}
            folders.append(make([], seed, [0.5], protocol="personal", measured=measured))
            (folders[-1] / "sessions.jsonl").write_text(json.dumps({"clients": names[seed]}) + "\n")
        return folders

    def test_each_hospital_has_a_column_of_any_metric(self, hospitals, cli):
        asked = ("compare", *hospitals, "--protocol", "personal", "--metric", "auroc", "--format")
        heads, _, row = cli(*asked, "markdown", "--columns", "auroc,clients").stdout.splitlines()[:3]
        assert heads == "| method | auroc | North | South | East & West |"
        assert row == "| fedavg | 0.7000 ± 0.0000 | 0.8000 ± 0.1414 | 0.6000 ± 0.1414 | - |"
        assert cli(*asked, "markdown", "--clients").stdout.splitlines()[0].endswith("| North | South | East & West |")
        (line,) = csv.DictReader(io.StringIO(cli(*asked, "csv", "--clients").stdout))
        assert float(line["client_North_mean"]) == pytest.approx(0.8)
        assert (line["client_East & West_mean"], line["client_East & West_n"]) == ("", "0")
        frame = fedcore_study.compare(hospitals, protocol="personal", clients=True)
        assert frame.loc["fedavg", "client_East & West"] == pytest.approx(0.2), "accuracy: 0.3 and 0.1"

    def test_clients_without_names_have_columns_if_these_are_asked_for(self, make, cli):
        """Client 0 of one seed is not client 0 of another one."""
        each = {"per_client": {str(k): k / 20 for k in range(11)}}
        asked = ("compare", make([], 0, [0.5], protocol="personal", measured=each), "--protocol", "personal")
        assert "client 0" not in cli(*asked, "--clients").stdout
        heads = cli(*asked, "--columns", "clients", "--format", "csv").stdout.splitlines()[0].split(",")
        shown = [head for head in heads if head.startswith("client_") and head.endswith("_mean")]
        assert shown == [f"client_client {k}_mean" for k in range(11)]

    def test_more_than_twelve_hospitals_have_columns_if_these_are_asked_for(self, make, cli):
        measured = {"per_client": {str(k): k / 20 for k in range(13)}}
        folder = make([], 0, [0.5], protocol="personal", measured=measured)
        (folder / "sessions.jsonl").write_text(json.dumps({"clients": [f"Site {k}" for k in range(13)]}) + "\n")
        asked = ("compare", folder, "--protocol", "personal", "--format", "markdown")
        assert "Site" not in cli(*asked, "--clients").stdout
        assert "| Site 0 % |" in cli(*asked, "--columns", "clients").stdout

    def test_the_server_has_no_clients(self, make):
        with raises(ConfigError, "--columns clients", "'global'", "--p"):
            join([make([], 0, [0.5])], columns=["clients"])

    def test_the_lowest_deviation_is_best_and_the_highest_mean(self):
        signs = {name: sign for name, (_, _, _, sign) in headings_of_spread(Measure("std", -1)).items()}
        assert signs["mean"] == signs["worst"] == 1
        assert signs["std"] == -1

    def test_what_is_not_recorded(self):
        found = Spread.of({"accuracy": 0.5, "mean": True, "std": 0.1, "worst10": "x"}, ACCURACY)
        assert found == Spread(None, 0.1, None, None)
        assert found.jain is None
        assert Spread.of({}, ACCURACY).variance is None

    def test_a_run_records_the_figures_of_its_clients(self, tmp_path):
        config = RunConfig(rounds=1, clients=25, alpha=0.3, client_test_fraction=0.3, workers=0, out=tmp_path / "run")
        row = fedcore.run(config).metrics["global_local"]
        each = sorted(row["per_client"].values())
        few = statistics.fmean(each[:2]), statistics.fmean(each[-2:])
        assert astuple(Spread.of(row, ACCURACY)) == pytest.approx(
            (statistics.fmean(each), statistics.pstdev(each), *few), abs=1e-6
        )

    def test_columns_over_seeds(self, make):
        folders = [make([], seed, [0.5], protocol="personal") for seed in (0, 1)]
        for seed, folder in enumerate(folders):
            for file in ("metrics.jsonl", "summary.json"):
                content = json.loads((folder / file).read_text())
                spread = {"mean": 0.5 + seed / 10, "std": math.sqrt(0.05), "worst10": 0.2 + seed / 10, "best10": 0.8}
                content["metrics"]["personal"] |= spread
                (folder / file).write_text(json.dumps(content) + "\n")
            seal(folder)
        for at in (None, 1):
            found, _ = join(folders, protocol="personal", by_client=True, round=at)
            row = found.blocks[0].rows[0]
            assert row.clients["mean"] == Figure(pytest.approx(0.55), pytest.approx(math.sqrt(0.005)), 2)
            assert row.clients["variance"] == Figure(pytest.approx(500), pytest.approx(0, abs=1e-9), 2)
            (block,) = found.blocks
            shown = dict(zip(headings(found, block), cells(found, block, row), strict=True))
            assert shown["clients' mean %"] == "55.00 ± 7.07"
            assert shown["worst 10 %"] == "25.00 ± 7.07"
            assert shown["Jain"].startswith("0.8")
        (line,) = csv.DictReader(io.StringIO(formats.as_csv([found])))
        assert float(line["clients_worst_mean"]) == pytest.approx(0.25)
        with raises(ConfigError, "--clients", "'global'", "--p"):
            join([make([], 0, [0.5])], by_client=True)

    def test_figures_of_reports(self, make):
        folders = [make(["attack"], seed, [0.5]) for seed in (0, 1)]
        for seed, folder in enumerate(folders):
            for file in ("metrics.jsonl", "summary.json"):
                content = json.loads((folder / file).read_text())
                content["reports"] = {"attack": {"success": 0.5 + seed / 10, "malicious": [seed]}}
                (folder / file).write_text(json.dumps(content) + "\n")
            seal(folder)
        for at in (None, 1):
            found, _ = join([*folders, make([], 0, [0.6])], round=at, reported=["attack.success"])
            (block,) = found.blocks
            shown = [dict(zip(headings(found, block), cells(found, block, row))) for row in block.rows]
            assert [row["attack.success"] for row in shown] == ["0.5500 ± 0.0707", "-"]
        lines = list(csv.DictReader(io.StringIO(formats.as_csv([found]))))
        assert [line["attack.success_mean"] for line in lines] == ["0.55", ""]
        with raises(ConfigError, "'attack.malicious'"):
            join(folders, reported=["attack.malicious"])

    def test_own_classes_have_their_names_unless_two_are_alike(self, make):
        own, other = "module:study.new.Near_It", "module:old.Near_It"
        found, _ = join([make([], 0, [0.5]), make([own], 0, [0.6]), make(["object:Far"], 0, [0.7])])
        assert [row.label for row in found.blocks[0].rows] == ["fedavg", "Near_It", "Far"]
        assert r"Near\_It & 1" in formats.as_latex([found])
        found, _ = join([make([own], 1, [0.5]), make([other, "object:Far"], 1, [0.6])])
        assert {row.label for row in found.blocks[0].rows} == {own, f"{other}+Far"}

    def test_names_of_a_strangers_run_are_only_names(self, make):
        names = ["=1+1", "-2|x", "<script>", "\x1b[31mred", "two\nlines", r"\input{x}", "![](https://example.org)"]
        folders = [make([], 0, [0.5], dataset=name, model=name) for name in names]
        found = join(folders, by=["dataset"])[0]
        assert not any("\x1b" in made([found]) for made in formats.FORMATS.values())
        rows = list(csv.DictReader(io.StringIO(formats.as_csv([found]))))
        assert [row["row"] for row in rows[:2]] == ["'=1+1", "'-2|x"]
        assert [row["model"] for row in rows[2:5]] == ["<script>", "\ufffd[31mred", "two lines"]
        markdown = formats.as_markdown([found])
        assert r"**model -2\|x**" in markdown
        assert r"| \\input{x} | 1 |" in markdown
        assert "<script" not in markdown
        assert "![](" not in markdown
        latex = re.sub("^% .*", "", formats.as_latex([found]), flags=re.MULTILINE)
        assert r"\textbackslash{}input\{x\} & 1" in latex
        assert "\nlines" not in latex

    def test_runs_without_figures_by_client_are_compared(self, make):
        found, _ = join([make([], 0, [0.5], protocol="personal")], protocol="personal", by_client=True)
        assert cells(found, found.blocks[0], found.blocks[0].rows[0])[3:9] == ["-"] * 6


class TestFindings:
    @pytest.mark.parametrize(
        ("mean", "corrected", "word"),
        [(0.01, 0.049, "better"), (-0.01, 0.001, "worse"), (0.01, 0.05, "same"), (0.01, None, "")],
    )
    def test_verdicts(self, mean, corrected, word):
        assert verdict(Difference(mean, None, None, 3, corrected=corrected)) == word
        assert verdict(Difference(mean, None, None, 2)) == "few"
        assert verdict(None) == "none"

    def test_in_words(self, make):
        curves = {
            (): [0.50, 0.51, 0.52],
            ("moon",): [0.60, 0.61, 0.621],
            ("fedprox",): [0.51, 0.50, 0.53],
            ("scaffold",): [0.4, 0.41, 0.421],
            ("fedcd",): [0.49, 0.50, 0.51],
        }
        folders = [make(list(name), s, [value]) for name, values in curves.items() for s, value in enumerate(values)]
        folders += [make(["ditto"], seed, [0.9]) for seed in (0, 1)]
        (block,) = join(folders)[0].blocks
        assert block.findings == [
            "Better than fedavg: moon (+10.03 [+9.89, +10.18], p < 0.001).",
            "Worse than fedavg: scaffold (-9.97 [-10.11, -9.82], p < 0.001).",
            "No significant difference to fedavg: fedprox (+0.33 [-2.54, +3.20], p = 0.667, about 129 seeds would show "
            "a difference of this size).",
            "Too few seeds to rank ditto against fedavg: ditto (+39.50 over 2 seeds). Run at least 3.",
            "fedcd: the same difference on every seed (-1.00); a t-test has no deviation to go by, run more seeds.",
            "Tested by paired t-tests over the seeds, at level 0.05, with p-values corrected by Holm for the 3 "
            "comparisons with fedavg in this table. Each interval is of one comparison alone.",
        ]
        text = formats.as_markdown([join(folders)[0]])
        assert all(f"- {tables.markdown_text(sentence)}" in text for sentence in block.findings)
        shown = {row.label: cells(join(folders)[0], block, row)[3:5] for row in block.rows}
        assert shown["fedcd"] == ["-1.00 (3 seeds)", "-"]
        (line,) = (row for row in formats.plain_rows(join(folders)[0]) if row["row"] == "fedcd")
        assert (line["p"], line["p_holm"], line["verdict"]) == (None, None, None)

    def test_what_one_comparison_shows_five_do_not(self, make):
        near, far = [0.5, 0.5, 0.5], [0.510, 0.508, 0.513]
        folders = [make([], s, [value]) for s, value in enumerate(near)]
        folders += [make(["moon"], s, [value]) for s, value in enumerate(far)]
        (block,) = join(folders)[0].blocks
        assert block.findings[1:] == [
            "Better than fedavg: moon (+1.03 [+0.41, +1.66], p = 0.019).",
            "Tested by a paired t-test over the seeds, at level 0.05.",
        ]
        noise = ([0.49, 0.52, 0.5], [0.51, 0.47, 0.51], [0.5, 0.49, 0.53], [0.48, 0.52, 0.51])
        folders += [make({"fedprox": {"mu": i}}, s, [v]) for i, vs in enumerate(noise) for s, v in enumerate(vs)]
        found = join(folders)[0]
        (block,) = found.blocks
        assert verdict(block.rows[1].difference) == "same"
        assert block.rows[1].difference.corrected == pytest.approx(5 * block.rows[1].difference.p)
        assert block.findings[1].startswith("No significant difference to fedavg: moon (+1.03 [+0.41, +1.66], p = 0.09")
        assert block.findings[-1] == (
            "Zero is outside of the interval of moon, but after the correction for 5 comparisons that can be chance."
        )
        assert cells(found, block, block.rows[1])[4] == "0.096"
        *_, line = csv.DictReader(io.StringIO(formats.as_csv([found])))
        assert float(line["p_holm"]) <= 1.0
        assert r"\shortstack[r]{p\\(Holm)}" in formats.as_latex([found])

    def test_one_row_shows_nothing_and_two_without_baseline_the_highest(self, make):
        assert join([make([], 0, [0.5])])[0].blocks[0].findings == []
        found = join([make([name], 0, [0.5]) for name in ("moon", "fedprox")])[0]
        assert found.blocks[0].findings == ["Highest mean accuracy: moon and fedprox with 50.00 %."]


class TestRanks:
    def blocks(self, make, **options):
        accuracy = {(): 0.5, ("moon",): 0.6, ("fedprox",): 0.55}
        values = [(alpha, list(name), value) for alpha in (0.1, 0.5, 1.0) for name, value in accuracy.items()]
        return [make(name, 0, [value], alpha=alpha, **options) for alpha, name, value in values]

    def test_blocks_of_other_data_are_ranked(self, make):
        found, _ = join(self.blocks(make))
        assert found.ranks.average == {"fedavg": 3.0, "moon": 1.0, "fedprox": 2.0}
        said = "Average ranks over 3 data settings, 1 is the best: moon 1.00, fedprox 2.00, fedavg 3.00."
        assert str(found.ranks).startswith(f"{said} Friedman's test finds a difference (p = 0.050). ")
        assert said in formats.as_markdown([found])
        assert f"% {said}" in formats.as_latex([found])
        assert json.loads(formats.as_json([found]))["ranks"]["average"]["moon"] == 1.0

    def test_the_same_data_under_other_settings_would_count_twice(self, make):
        assert join([*self.blocks(make), *self.blocks(make, lr=0.3)])[0].ranks is None
        assert join(self.blocks(make)[:3])[0].ranks is None

    def test_a_setting_without_effect_on_the_partition_makes_no_other_data(self, make):
        blocks = [*self.blocks(make), *self.blocks(make, classes_per_client=3)]
        assert join(blocks)[0].ranks is None

    def test_rows_with_different_seeds_are_not_ranked(self, make):
        """MOON is below FedAvg on each seed that it has, and lacks the one that is hard for both."""
        curves = {(): [0.90, 0.91, 0.60], ("moon",): [0.89, 0.90], ("fedprox",): [0.91, 0.92, 0.61]}
        folders = [
            make(list(name), seed, [value], alpha=alpha)
            for alpha in (0.1, 0.5)
            for name, values in curves.items()
            for seed, value in enumerate(values)
        ]
        found, _ = join(folders)
        said = "the rows have different seeds (fedavg, fedprox: 0, 1, 2; moon: 0, 1), so their means are not ranked"
        assert any(note.startswith(said) for note in found.notes)
        assert found.ranks is None
        for text in (formats.as_markdown([found]), formats.as_latex([found])):
            assert "Highest" not in text
            assert r"\textbf" not in text
        found, _ = join([*folders, *(make(["moon"], 2, [0.5], alpha=alpha) for alpha in (0.1, 0.5))])
        assert found.ranks.average == {"fedprox": 1.0, "fedavg": 2.0, "moon": 3.0}
        assert found.notes == []
        assert r"\textbf{81.33" in formats.as_latex([found])

    @pytest.mark.parametrize("partition", ["iid", "shards", "part.json", "object:5f0f18402c63"])
    def test_an_alpha_without_effect_makes_no_other_data(self, make, partition):
        copies = self.blocks(make, partition=partition, dealt="all alike")
        found, notes = join(copies)
        assert [(block.settings, len(block.rows)) for block in found.blocks] == [({}, 3)]
        assert found.ranks is None
        assert notes == [
            "runs that repeat others under another alpha, which their partition does not use, are left out: 6"
        ]
        with pytest.warns(RuntimeWarning, match="repeat others"):
            assert len(fedcore_study.compare(copies, each=True)) == len(copies) - 6
        found, _ = join([*copies, *self.blocks(make)])
        assert found.ranks.tables == 4
        name = partition.removeprefix("object:")
        titles = [f"partition {name}", *(f"partition dirichlet, alpha {alpha}" for alpha in (0.1, 0.5, 1.0))]
        assert [named(block.settings) for block in found.blocks] == titles
        made = build(find_runs([*self.blocks(make), *copies], print), [], title="t", points=0)
        assert [section.title for section in made.sections] == [*titles[1:], titles[0]]
        by_alpha, notes = join(copies, by=["alpha"], baseline="0.1")
        assert ([row.label for row in by_alpha.blocks[0].rows], notes) == (["0.1", "0.5", "1.0"], [])
        both, _ = join([make([], 1, [0.5], partition=partition), make([], 1, [0.6])], by=["partition"])
        assert [row.label for row in both.blocks[0].rows] == [name, "dirichlet"]


def test_virtual_time_to_the_target(make):
    folder = make([], 0, [0.3, 0.7, 0.8])
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) | {"virtual_time": 10.0 * n} for n, line in enumerate(text.splitlines(), 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seal(folder)
    found, _ = join([folder], target=0.6)
    (row,) = found.blocks[0].rows
    assert row.virtual == Figure(20.0, None, 1)
    assert headings(found, found.blocks[0])[-2] == "virtual s to 60 %"
    assert cells(found, found.blocks[0], row)[-2] == "20.0"
    plain, _ = join([make(["moon"], 0, [0.7])], target=0.6)
    assert "virtual s to 60 %" not in headings(plain, plain.blocks[0])


def test_a_search_by_optuna_is_read_as_its_trials(make, tmp_path):
    """Of two trials with the same options the finished one counts; a trial that never began is passed over."""
    study = tmp_path / "study"
    (study / "runs" / "trial-0003").mkdir(parents=True)
    (study / "study.log").write_text("")
    options = ({"lr": 0.1, "finished": False}, {"lr": 0.1}, {"lr": 0.2})
    for number, values in enumerate(options):
        make([], 0, [0.5], **values).rename(study / "runs" / f"trial-000{number}")
    found, notes = join([study], by=["lr"])
    assert [row.label for row in found.blocks[0].rows] == ["0.1", "0.2"]
    assert notes == []


def judged(folder, value):
    """Give a run its best figure on held-out parts."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["metrics"]["best_by_validation"] = {"round": 1, "validation": "personal", "validation_accuracy": value}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class TestTuned:
    """Methods at their own options stand in one table. Held-out parts choose, never the test set."""

    LR = 0.09347271781114277

    def test_each_method_at_its_own_options(self, make, cli):
        folders = [make([], seed, [0.5], lr=self.LR) for seed in (0, 1)]
        folders += [make({"moon": {"mu": 1.23456}}, seed, [0.6], lr=0.01) for seed in (0, 1)]
        assert len(join(folders)[0].blocks) == 2
        found, _ = join(folders, tuned=["lr,mu"], labels={"moon": "MOON", "fedavg": "FedAvg"}, baseline="FedAvg")
        (block,) = found.blocks
        assert [row.label for row in block.rows] == ["FedAvg", "MOON"]
        assert "lr" not in found.common
        assert "each row has its own tuned options (FedAvg: lr 0.0935; MOON: lr 0.01, mu 1.23)" in block.notes
        shown = cli(
            "compare", *folders, "--tuned", "lr", "--tuned", "moon.mu", "--label", "moon=MOON", "--latex"
        ).stdout
        assert re.search(r"^fedavg & 2 .*\nMOON & 2 ", shown, re.MULTILINE)
        frame = fedcore_study.compare(folders, tuned=["lr", "mu"], labels={"moon": "MOON"})
        assert list(frame.index) == ["fedavg", "MOON"]
        each = fedcore_study.compare(folders, tuned="lr,mu", labels={"moon": "MOON"}, each=True)
        assert list(each["method"]) == ["fedavg"] * 2 + ["MOON"] * 2

    def test_of_several_values_the_best_on_held_out_parts(self, make):
        """The test set prefers the others, and so does seed 0 alone; one value has fewer seeds."""
        values = {0.1: (0.9, 0.1), 0.2: (0.6, 0.8), 0.3: (1.0,)}
        folders = [
            judged(make([], seed, [1 - held_out], lr=lr), held_out)
            for lr, of_seeds in values.items()
            for seed, held_out in enumerate(of_seeds)
        ]
        found, notes = join([*folders, make([], 1, [0.5], lr=0.3, finished=False)], tuned=["lr"])
        (row,) = found.blocks[0].rows
        assert sorted(row.values.values()) == pytest.approx([0.2, 0.4])
        assert notes == [
            "fedavg: its tuned options are chosen among values with 2 finished seeds, without lr 0.3 (1 seed)"
        ]
        bare = [make([], 0, [0.5], lr=lr) for lr in (0.1, 0.2)]
        with raises(ConfigError, "--client-test-fraction"):
            join(bare, tuned=["lr"])

    def test_values_are_compared_on_the_seeds_that_all_of_them_finished(self, make):
        """Seed 2 is hard: in the mean over other seeds 0.2 looked worse, though it is better on the one they share."""
        values = {0.1: {0: 0.5, 1: 0.9}, 0.2: {1: 0.95, 2: 0.4}}
        folders = [judged(make([], s, [v], lr=lr), v) for lr, of_seeds in values.items() for s, v in of_seeds.items()]
        found, notes = join(folders, tuned=["lr"])
        assert set(found.blocks[0].rows[0].values) == {1, 2}
        assert notes == ["fedavg: its values of tuned options have finished on different seeds, compared over seed 1"]
        _, notes = join([folders[0], folders[3]], tuned=["lr"])
        assert notes == ["fedavg: its values of tuned options have finished on different seeds, none of them on all"]

    def test_nothing_is_chosen_before_a_run_is_finished(self, make):
        folders = [make([], 0, [0.5, 0.6], lr=lr, rounds=9, finished=False) for lr in (0.1, 0.2)]
        _, notes = join(folders, tuned=["lr"], round=1)
        assert notes == ["fedavg: no run is finished that could choose its tuned options; lr 0.1 is shown"]

    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_figures_of_the_samples_that_chose_are_noted_as_too_high(self, make, share):
        options = {"lr": self.LR, "client_test_fraction": 0.2, "validation_share": share}
        rows = {"fedavg": find_runs([make([], 0, [0.5], **options)], print)}
        protocols = ("global", "personal", "global_local", "personal_validation", "unseen")
        noted = [protocol for protocol in protocols if "too high" in at_which(rows, ["lr"], protocol)]
        assert noted == (["personal_validation"] if share else [*protocols[1:4]])

    def test_a_test_set_of_the_samples_that_chose_is_noted_as_too_high(self, make):
        """PFLlib's and LEAF's clients have test samples that are the test set: a model has one loss on both."""
        run = make([], 0, [0.5], lr=self.LR)
        summary = json.loads((run / "summary.json").read_text())
        losses = zip(("global", "global_local"), (1.357791983637, 1.357791984337), strict=True)
        summary["metrics"].update({name: {"accuracy": 0.5, "loss": loss} for name, loss in losses})
        (run / "summary.json").write_text(json.dumps(summary))
        note = at_which({"fedavg": find_runs([run], print)}, ["lr"], "global")
        assert "the samples of global chose them, so it is too high: train with --validation-share 0.5" in note

    def test_what_a_search_tried_is_known(self, make, tmp_path):
        """Two searches are one table of two methods, each at its best trial; --by looks at the trials."""
        for name, best in (("fedavg", 0.2), ("moon", 0.1)):
            study = tmp_path / name
            (study / "runs").mkdir(parents=True)
            asked = {"user_attr": {"asked": {"--rounds": 1, "--search lr": "0.1..0.2", "--search batch_size": "8..64"}}}
            (study / "study.log").write_text('{"op_code":0}\n' + json.dumps(asked) + "\n")
            for number, lr in enumerate((0.1, 0.2)):
                plugins = [name] if name == "moon" else []
                run = judged(make(plugins, 0, [lr], lr=lr), 0.9 if lr == best else 0.8)
                run.rename(study / "runs" / f"trial-000{number}")
        studies = [tmp_path / "fedavg", tmp_path / "moon"]
        found, notes = join(studies)
        assert [(row.label, row.summary.mean) for row in found.blocks[0].rows] == [("fedavg", 0.2), ("moon", 0.1)]
        assert "(fedavg: lr 0.2, batch_size 16; moon: lr 0.1, batch_size 16)" in found.notes[-1]
        assert notes == []
        assert len(join(studies, by=["plugin", "lr"])[0].blocks[0].rows) == 4

    def test_numbers_have_three_digits_unless_two_would_be_alike(self, make, cli):
        folders = [make([], 0, [0.5], lr=lr) for lr in (self.LR, 0.01)]
        assert [row.label for row in join(folders, by=["lr"])[0].blocks[0].rows] == ["0.0935", "0.01"]
        assert re.search(r"^lr 0.0935 *$", cli("compare", *folders).stdout, re.MULTILINE)
        alike = [make({"moon": {"mu": mu}}, 0, [0.5]) for mu in (1.2341, 1.2342)]
        assert [row.label for row in join(alike)[0].blocks[0].rows] == ["moon (mu=1.2341)", "moon (mu=1.2342)"]

    def test_rows_by_the_names_of_runs(self, make):
        folders = [make([], seed, [0.5], lr=0.1, name="FedAvg-small") for seed in (0, 1)]
        folders += [make(["moon"], seed, [0.6], lr=0.2, name="x") for seed in (0, 1)]
        for folder in folders[2:]:
            (folder / "labels.json").write_text(json.dumps({"name": "ours", "tags": [], "note": None}))
        found, _ = join(folders, by=["name"])
        assert [row.label for row in found.blocks[0].rows] == ["FedAvg-small", "ours"]
        assert found.blocks[0].baseline == "FedAvg-small"
        with raises(ConfigError, "'ours'"):
            join([*folders, make(["moon"], 2, [0.6], name="ours")], by=["name"])

    def test_names_that_do_not_exist(self, make, cli):
        folders = [make([], 0, [0.5]), make(["moon"], 0, [0.5])]
        with raises(UnknownNameError, "--tuned", "'ml'"):
            join(folders, tuned=["ml"])
        with raises(UnknownNameError, "'mon'", "'moon'"):
            join(folders, labels={"mon": "MOON"})
        with raises(ConfigError, "2", "'moon'"):
            join(folders, labels={"fedavg": "moon"})
        assert "write ROW=NAME" in cli("compare", *folders, "--label", "MOON").stderr


class TestCautions:
    @pytest.fixture
    def sized(self, make):
        """Write a run whose model has some parameters and, perhaps, a head; returns its folder."""

        def write(plugins, seed, parameters, head=None, **options):
            folder = make(plugins, seed, [0.5], **options)
            session = {"model": {"parameters": parameters, "projection": head}}
            (folder / "sessions.jsonl").write_text(json.dumps(session) + "\n")
            seal(folder)
            return folder

        return write

    def test_methods_with_another_model_than_the_baseline_are_named(self, sized):
        folders = [sized([], 0, 1000), sized(["fedprox"], 0, 1000)]
        folders += [sized(plugins, 0, 1600, 256) for plugins in (["moon"], ["moon", "uscc"])]
        (note, _) = join(folders)[0].notes
        assert note == (
            "the methods do not train the same model. moon, moon+uscc: 1,600 parameters and a projection head; the "
            "baseline fedavg: 1,000 parameters and no projection head. To compare like with like run all of them with "
            "--projection, which gives each the head"
        )
        text = formats.as_markdown([join(folders)[0]])
        assert f"Note: {note}." in text
        assert f"% Note: {note}." in formats.as_latex([join(folders)[0]])
        assert json.loads(formats.as_json([join(folders)[0]]))["blocks"][0]["notes"][0] == note

    def test_like_with_like_and_unknown_models_are_not_warned_of(self, sized, make):
        alike = [sized(plugins, 0, 1600, 256, projection=True) for plugins in ([], ["moon"])]
        assert not any("model" in note for note in join(alike)[0].notes)
        unknown = [make(plugins, 0, [0.5]) for plugins in ([], ["moon"])]
        assert not any("model" in note for note in join(unknown)[0].notes)
        damaged = [sized([], 0, 1000), sized(["moon"], 0, "many", 256)]
        assert not any("model" in note for note in join(damaged)[0].notes)

    def test_another_model_without_a_head(self, sized):
        (note, _) = join([sized([], 0, 1000), sized(["fedper"], 0, 900)])[0].notes
        assert note.endswith("The difference to fedavg is partly that of the models")

    @pytest.mark.parametrize(("seeds", "cell"), [(1, "+0.00 (1 seed)"), (2, "+0.00 (2 seeds)"), (3, "+0.00 [+0.00")])
    def test_few_seeds_have_no_interval(self, make, seeds, cell):
        found = join([make(plugins, seed, [0.5]) for plugins in ([], ["moon"]) for seed in range(seeds)])[0]
        (block,) = found.blocks
        assert cells(found, block, block.rows[1])[3].startswith(cell)
        assert bool(found.notes) == (seeds < 3)
        *_, line = csv.DictReader(io.StringIO(formats.as_csv([found])))
        assert bool(line["difference_low"]) == bool(line["difference_high"]) == (seeds >= 3)

    @pytest.mark.parametrize(("plugin", "schedule"), [("moon", "cosine"), ("fedproc", "constant")])
    def test_a_schedule_that_restarted_is_named(self, make, plugin, schedule):
        found = find_runs([make(p, 0, [0.5] * 2, lr_schedule=schedule) for p in ([], [plugin])], print)
        changes = {0: [{"round": 1, "workers": [0, 1]}], 1: [{"round": 1, "rounds": [1, 2]}]}
        (note, _) = sorted(
            compare_runs([replace(run, changes=changes[i]) for i, run in enumerate(found)]).notes, reverse=True
        )
        said = "runs that were resumed with another --rounds, which their learning rate or method follows"
        assert note.startswith(f"{said}: {plugin} (1). ")
        unbegun = [{"round": 0, "rounds": [1, 2]}]
        assert len(compare_runs([replace(run, changes=unbegun) for run in found]).notes) == 1

    def test_methods_whose_clients_fail_are_named_with_the_first_reason(self, make):
        def failure(client, kind, message="late"):
            return {"client": client, "kind": kind, "message": message}

        simulated = [failure(0, "dropped"), failure(1, "deadline"), failure(99, "raised")]
        raised = [failure(2, "raised", "ValueError: no k."), failure(3, "raised", "other"), failure(3, "raised")]
        folders = [make(plugins, 0, [0.5, 0.6], rounds=2) for plugins in ([], ["moon"])]
        for folder, found in zip(folders, ([simulated, []], [simulated + raised, raised[1:]]), strict=True):
            lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            whole = [{**line, "cohort": [*range(10)], "failures": found[line["round"]]} for line in lines]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))
            seal(folder)
        said = "clients failed in runs of: moon ({}). Their figures come from the others: ValueError: no k"
        assert said.format("1.5 of 10 in a round") in join(folders)[0].notes
        assert said.format("2.0 of 10 in a round") in join(folders, round=1)[0].notes
        table = build(find_runs(folders, print), [], title="t", points=0).details["2 runs"]
        assert [(row[1], row[-1]) for row in table.rows] == [("fedavg", "0"), ("moon", "3")]

    def test_own_models_are_pointed_to(self, make):
        """The default table compares global models, of which Ditto's is FedAvg's."""
        folders = [make([], 0, [0.5]), make(["ditto"], 0, [0.5], also={"personal": 0.7})]
        said = "ditto has own models on the clients, which this table does not measure: --protocol personal"
        assert said in join(folders)[0].notes
        assert said not in join(folders, protocol="personal")[0].notes
        adapted = [make([], seed, [0.5], also={"unseen_adapted": 0.7}) for seed in (1, 2)]
        assert not any("own models" in note for note in join(adapted)[0].notes)

    def test_code_that_changed_between_the_runs_is_named(self, make):
        """A sweep that goes on after a change of an editable package keeps its finished runs."""
        folders = [make(plugins, seed, [0.5]) for plugins in ([], ["moon"]) for seed in (0, 1)]

        def notes(*sources):
            for folder, source in zip(folders[2:], sources, strict=True):
                versions = {"fedcore": source, "source of fedcore-moon": source, "module:data.mine": "a"}
                (folder / "sessions.jsonl").write_text(json.dumps({"versions": versions}) + "\n")
            return [note for note in join(folders)[0].notes if "code changed" in note]

        assert notes("a", "a") == []
        (note,) = notes("a", "b")
        assert note.startswith("some code changed between the runs: source of fedcore-moon (moon). To compare one")

    def test_a_data_set_that_changed_between_the_runs_is_told(self, make):
        """A CSV file with the same labels was corrected after the first method's runs."""
        folders = [make(plugins, seed, [0.5]) for plugins in ([], ["moon"]) for seed in (0, 1)]
        folders += [make([], 0, [0.5], dataset="mnist")]

        def notes(*contents):
            for folder, content in zip(folders, contents, strict=True):
                file = folder / "config.yaml"
                replace(saved.SavedConfig.read(file), data=content).write(file)
            found, _ = join(folders, by=["plugin", "dataset"])
            return [note for note in found.notes if "samples of a data set" in note]

        assert notes("a", "a", "a", "a", "b") == []
        (note,) = notes("a", "a", "a", "c", "b")
        assert f"between {folders[0]} and {folders[3]}:" in note

    def test_runs_without_the_protocol_are_counted(self, make):
        folders = [make([], seed, [0.5]) for seed in range(3)] + [make(["moon"], 0, [0.5])]
        (first, *_) = join([*folders, make(["ditto"], 0, [0.5], protocol="personal")], protocol="personal")[1]
        said = "4 runs have no figures for protocol 'personal' and are left out: fedavg (3), moon (1)"
        assert first == f"{said}; they have global (--protocol)"

    def test_runs_are_compared_at_a_round_after_which_they_were_evaluated(self, make):
        """The messages name such a round, and the runs once: a sweep has many."""
        folders = [make(["moon"], seed, [None, 0.5, None, 0.6, None], finished=False, rounds=9) for seed in range(3)]
        with raises(ConfigError, "no run is finished", "--round 4"):
            join(folders)
        with raises(ConfigError, "after 5 rounds", "--round 4"):
            join(folders, round=5)
        every = make([], 0, [0.1, 0.2, 0.3, 0.4, 0.5], rounds=9)
        notes = join([*folders, every], round=3)[1]
        assert notes[0] == "3 runs were not evaluated after round 3 and are left out: moon (3)"
        (note, *_) = join([folders[0], every], round=3)[1]
        assert note == f"{folders[0]} was not evaluated after round 3 and is left out"

    def test_runs_that_differ_by_rounding_stand_in_one_table(self, make):
        """As those of a sweep with ``--stack auto``, which leaves clients of some methods alone."""
        folders = [make([], seed, [0.5 + seed / 9], stack=24) for seed in range(3)]
        folders += [make(["fedsam"], seed, [0.6 + seed / 8]) for seed in range(3)]
        (block,) = join(folders)[0].blocks
        assert block.rows[1].difference.n == 3
        (note,) = block.notes
        assert note.startswith("the runs differ in stack (fedavg: 24; fedsam: 1), which changes results by rounding")
        both = [*folders, *(make([], seed, [0.5 + seed / 9], stack=1) for seed in range(3))]
        apart = join(both)[0].blocks  # they were compared on purpose
        assert [sorted(row.label for row in block.rows) for block in apart] == [["fedavg"], ["fedavg", "fedsam"]]
        (block,) = join(both, by=["plugin", "stack"])[0].blocks
        assert not any("by rounding" in note for note in block.notes)

    def test_a_note_of_some_blocks_names_them(self, make):
        folders = [make(p, seed, [0.5], alpha=0.1) for p in ([], ["moon"]) for seed in range(3)]
        folders += [make(p, 0, [0.5], alpha=5.0) for p in ([], ["moon"])]
        (note,) = join(folders)[0].notes
        assert note.startswith("alpha 5.0: differences over 1 seed say nothing")


def test_the_command(make, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedcore.tools import app

    monkeypatch.delenv("COLUMNS", raising=False)
    folders = [str(make(plugins, 0, [0.5], alpha=a)) for plugins in ([], ["moon"]) for a in (0.1, 0.5)]
    table = CliRunner().invoke(app, ["compare", *folders, "--target", "0.5"])
    assert table.exit_code == 0
    assert "alpha 0.5" in table.stdout
    assert "rounds to 50 %" in table.stdout
    few = "differences over 1 seed say nothing about other seeds, and have no interval; run at least 3"
    assert table.stderr == f"note: {few}\n"
    assert "+0.00 (1 seed)" in table.stdout
    assert "Highest mean accuracy: fedavg and moon with 50.00 %." in table.stdout
    assert r"\begin{table}" in CliRunner().invoke(app, ["compare", *folders, "--latex"]).stdout
    as_json = CliRunner().invoke(app, ["compare", *folders, "--format", "json", "--by", "alpha", "--round", "1"])
    assert len(json.loads(as_json.stdout)["blocks"]) == 2
    (tmp_path / "empty").mkdir()
    for arguments, name in (
        ([str(tmp_path / "empty")], tmp_path / "empty"),
        ([*folders, "--format", "html"], "'html'"),
        ([*folders, "--clients"], "--clients: protocol 'global'"),
        ([*folders, "--protocol", "personal"], "'personal'"),
    ):
        result = CliRunner().invoke(app, ["compare", *arguments])
        assert result.stdout == ""
        refused(result, name)


def test_names_are_whole_in_a_narrow_terminal(make, monkeypatch):
    from typer.testing import CliRunner

    from fedcore.tools import app

    monkeypatch.setenv("COLUMNS", "80")
    methods = [[], *({"my-very-long-method": {"regularization_strength": value}} for value in (0.01, 0.02))]
    folders = [str(make(method, seed, [0.5 + seed / 10])) for method in methods for seed in range(3)]
    shown = CliRunner().invoke(app, ["compare", *folders, "--target", "0.5"]).stdout.partition("Highest")[0]
    names = "".join(line.strip().split("  ")[0].replace(" ", "") for line in shown.splitlines())
    assert all(f"my-very-long-method(regularization_strength={value})" in names for value in (0.01, 0.02)), shown


def test_reading_runs_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, fedcore.cli.app, fedcore_study.comparisons.compare\n"
        "import fedcore_study.comparisons.formats, fedcore_study.comparisons.records\n"
        "print({'torch', 'scipy'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout == "set()\n"


def test_metrics_next_to_accuracy(make):
    """Mean and deviation over the seeds; the best of an error is the smallest, unknown metrics have no best."""
    figures = {"fedavg": [(0.5, 0.2), (0.7, 0.4)], "moon": [(0.9, 0.1), (0.9, None)]}
    folders = [
        make(
            [name] if name == "moon" else [],
            seed,
            [0.5],
            measured={"macro-f1": f1, "ece": ece, "Own": 1.0, "macro-f1_mean": 9},
        )
        for name, values in figures.items()
        for seed, (f1, ece) in enumerate(values)
    ]
    made = compare_runs(find_runs(folders, print))
    (block,) = made.blocks
    assert headings(made, block)[2:6] == ["accuracy %", "macro-f1", "ece", "Own"]
    rows = {row.label: row for row in block.rows}
    assert cells(made, block, rows["fedavg"])[3:6] == ["0.6000 ± 0.1414", "0.3000 ± 0.1414", "1.0000 ± 0.0000"]
    assert cells(made, block, rows["moon"])[4] == "0.1000 (1/2)", "the other seed has no value"
    best = {c.heading: formats.best_rows(c, block.rows) for c in formats.table_columns(made, block)}
    moon = [row.label for row in block.rows].index("moon")
    assert (best["macro-f1"], best["ece"], best["Own"]) == ([moon], [], [])
    assert r"\textbf{0.9000" in formats.as_latex([made])
    values = {row["row"]: row for row in formats.plain_rows(made)}
    assert values["fedavg"]["metric_macro-f1_mean"] == pytest.approx(0.6)
    assert values["moon"]["metric_ece_n"] == 1
    frame = fedcore_study.compare(folders)
    assert frame.loc["fedavg", "ece_mean"] == pytest.approx(0.3)
    assert list(fedcore_study.compare(folders, each=True)["macro-f1"]) == [0.5, 0.7, 0.9, 0.9]


def test_metrics_of_clients_have_a_mean_over_the_clients(make):
    measured = {"ece": 0.3, "ece_mean": 0.2, "ece_std": 0.1}
    folders = [make([name] * bool(name), 0, [0.5], protocol="personal", measured=measured) for name in ("", "moon")]
    made = compare_runs(find_runs(folders, print), protocol="personal")
    (block,) = made.blocks
    assert headings(made, block)[3:5] == ["ece", "ece (clients)"]
    assert cells(made, block, block.rows[0])[3:5] == ["0.3000", "0.2000"]
    assert direction("ece (clients)") == direction("ece") == -1
    each = fedcore_study.compare(folders, protocol="personal", metric="ece_mean", each=True)
    assert list(each["ece_mean"]) == [0.2, 0.2]
    with raises(ConfigError, "each=True"):
        fedcore_study.compare(folders, protocol="personal", clients=True, each=True)
    with raises(ConfigError, "'attack.success'"):
        fedcore_study.compare(folders, protocol="personal", reported=["attack.success"], each=True)


def test_a_row_per_run_has_the_figure_of_the_runs_task(make):
    folders = [make([], seed, [0.5], measured={"rmse": 2.0 + seed}) for seed in (0, 1)]
    for folder in folders:
        (folder / "sessions.jsonl").write_text('{"task": {"signs": {"rmse": -1}}}\n')
        summary = json.loads((folder / "summary.json").read_text())
        del summary["metrics"]["global"]["accuracy"]
        (folder / "summary.json").write_text(json.dumps(summary))
    assert list(fedcore_study.compare(folders, each=True)["rmse"]) == [2.0, 3.0]
    assert list(fedcore_study.compare(folders)["rmse_mean"]) == [2.5]


def test_a_method_without_own_models_is_measured_by_its_global_model(make):
    """FedAvg stands next to personal methods, on the same samples; alone it has no own models to compare."""
    folders = [make([], seed, [0.4, 0.5 + seed / 10], protocol="global_local") for seed in range(3)]
    folders += [make(["fedper"], seed, [0.6, 0.7 + seed / 5], protocol="personal") for seed in range(3)]
    found, notes = join(folders, protocol="personal", target=0.45)
    fedavg, fedper = found.blocks[0].rows
    assert (fedavg.label, fedavg.values) == ("fedavg", {0: 0.5, 1: 0.6, 2: 0.7})
    assert fedavg.rounds == Figure(2.0, 0.0, 3)
    assert fedper.difference.mean == pytest.approx(0.3)
    note = "fedavg has no own models: personal has the global model on the same samples (global_local)"
    assert (found.notes, notes) == ([note], [])
    assert list(fedcore_study.compare(folders, protocol="personal", each=True)["accuracy"])[:2] == [0.5, 0.6]
    assert fedcore_study.compare(folders, protocol="personal", round=1)["accuracy_mean"].round(9).tolist() == [0.4, 0.6]
    with raises(ConfigError, "'personal'"):
        join(folders[:3], protocol="personal")


def test_a_wide_table_has_a_column_per_setting(make, cli):
    """FedProx lacks a setting; the best of each column is bold; findings name their setting."""
    accuracies = {("", 0.1): 0.5, ("moon", 0.1): 0.75, ("", 0.5): 0.9, ("moon", 0.5): 0.8, ("fedprox", 0.5): 0.7}
    folders = [make([name] * bool(name), 0, [value], alpha=alpha) for (name, alpha), value in accuracies.items()]
    found, _ = join(folders)
    (table,) = formats.printed([found], wide=True)
    assert table.headings == ["method", "alpha 0.1", "alpha 0.5"]
    assert table.rows == [["fedavg", "50.00", "90.00"], ["moon", "75.00", "80.00"], ["fedprox", "-", "70.00"]]
    assert sorted(table.best) == [(0, 2), (1, 1)]
    assert table.findings[0] == "alpha 0.1: Highest mean accuracy: moon with 75.00 %."
    assert "| moon | 75.00 | 80.00 |" in cli("compare", *folders, "--wide", "--format", "markdown").stdout
    text = cli("compare", *folders, "--wide", "--latex").stdout
    assert r"moon & \textbf{75.00} & 80.00 \\" in text
    assert text.count(r"\begin{table}") == 1
    assert "paired by seed" not in text.partition(r"\begin{table}")[2]
    refused = cli("compare", *folders, "--wide", "--format", "csv")
    assert refused.exit_code == 2
    assert "--wide prints one figure as a table, markdown or latex: leave out --format csv\n" in refused.stderr


class TestOtherFigures:
    """Differences, tests, findings and ranks can be of another figure than accuracy."""

    @pytest.fixture
    def folders(self, make):
        losses = {"": (0.5, 0.6, 0.8), "moon": (0.2, 0.4, 0.5)}
        return [
            make([name] * bool(name), seed, [0.5], measured={"ece": ece, "Own": 1.0, "macro-f1": None})
            for name, values in losses.items()
            for seed, ece in enumerate(values)
        ]

    def test_a_smaller_error_is_better(self, folders):
        """Differences -0.3, -0.2, -0.3: mean -0.2667, deviation 0.0577; t is 8, p is 0.0153."""
        found, notes = join(folders, metric="ece")
        (block,) = found.blocks
        assert headings(found, block)[2:6] == ["ece", "Own", "macro-f1", "minus fedavg [95 % interval]"]
        moon = block.rows[1]
        assert cells(found, block, moon)[2] == "0.3667 ± 0.1528"
        assert cells(found, block, moon)[5] == "-0.2667 [-0.4101, -0.1232]"
        assert moon.difference.p == pytest.approx(0.015268, rel=1e-3)
        assert block.findings[:2] == [
            "Lowest mean ece: moon with 0.3667.",
            "Better than fedavg: moon (-0.2667 [-0.4101, -0.1232], p = 0.015).",
        ]
        assert notes == []
        best = {c.heading: formats.best_rows(c, block.rows) for c in formats.table_columns(found, block)}
        assert best["ece"] == [1]
        frame = fedcore_study.compare(folders, metric="ece")
        assert frame.loc["moon", ["ece_mean", "verdict"]].tolist() == [pytest.approx(1.1 / 3), "better"]

    @pytest.mark.parametrize(("smaller", "sign"), [(True, "Lowest"), (False, "Highest")])
    def test_a_metric_of_the_user_is_named_with_its_module(self, folders, tmp_path, monkeypatch, smaller, sign):
        code = f"import fedcore\nclass Own(fedcore.Metric):\n    lower_is_better = {smaller}\n"
        (tmp_path / f"own_{sign}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        found, _ = join(folders, metric=f"module:own_{sign}.Own")
        assert found.blocks[0].findings[0].startswith(f"{sign} mean Own: fedavg and moon with 1.0000")
        frame = fedcore_study.compare(folders, metric=f"module:own_{sign}.Own")
        assert frame["Own_mean"].tolist() == [1, 1]
        assert len(fedcore_study.compare(folders, metric=f"module:own_{sign}.Own", each=True)) == 6
        with raises(ConfigError, "'Other'"):
            join(folders, metric=f"module:own_{sign}.Other")

    @pytest.mark.slow  # it imports torchmetrics
    def test_a_metric_of_torchmetrics_is_named_with_its_prefix(self, make):
        folders = [make([], 0, [0.5], measured={"MulticlassHammingDistance": 0.5})]
        found, _ = join(folders, metric="torchmetrics:MulticlassHammingDistance")
        assert found.measure.sign == -1

    def test_ranks_are_of_the_figure(self, make):
        errors = {"": 0.5, "moon": 0.2, "fedprox": 0.3}
        folders = [
            make([name] * bool(name), 0, [1 - error], alpha=alpha, measured={"loss": 1 - error, "ece": error})
            for name, error in errors.items()
            for alpha in (0.1, 0.5)
        ]
        assert join(folders, metric="ece")[0].ranks.average == {"fedavg": 3.0, "moon": 1.0, "fedprox": 2.0}
        assert join(folders, metric="loss")[0].ranks.average == {"fedavg": 1.0, "moon": 3.0, "fedprox": 2.0}

    def test_the_worst_clients(self, make):
        measured = {"worst10": 0.25, "ece": 0.1, "ece_mean": 0.2}
        folders = [make([], 0, [0.5], protocol="personal", measured=measured)]
        found, _ = join(folders, protocol="personal", metric="worst10")
        assert cells(found, found.blocks[0], found.blocks[0].rows[0])[2] == "25.00"
        found, _ = join(folders, protocol="personal", metric="ece_mean")
        assert headings(found, found.blocks[0])[2:4] == ["ece_mean", "ece"]
        assert cells(found, found.blocks[0], found.blocks[0].rows[0])[2] == "0.2000"

    def test_what_cannot_be_compared_is_said(self, make, folders):
        with raises(ConfigError, "--metric"):
            join(folders, metric="Own")
        with raises(ConfigError, "'auroc'", "--metric"):
            join(folders, metric="auroc")
        with raises(ConfigError, "--target"):
            join(folders, metric="ece", target=0.5)
        _, notes = join([*folders, make(["fedprox"], 0, [0.5])], metric="ece")
        assert notes == ["runs that did not measure 'ece' are left out: fedprox (1)"]

    def test_a_seed_without_a_value_is_not_paired(self, make):
        folders = [make([], seed, [0.5], measured={"ece": ece}) for seed, ece in enumerate((0.5, None, 0.7))]
        folders += [make(["moon"], seed, [0.5], measured={"ece": 0.4}) for seed in range(3)]
        found, _ = join(folders, metric="ece")
        assert found.blocks[0].rows[1].difference.n == 2
        assert found.notes[0] == "moon: only 2 of 3 seeds have a pair in fedavg"


class TestColumns:
    """Several protocols stand in one table, with the columns that were asked for."""

    @pytest.fixture
    def folders(self, make):
        """FedAvg has no own models; Ditto has both. Metrics of clients have means of their own."""
        folders = []
        for seed in range(3):
            own = {"auroc": 0.8 + seed / 100, "auroc_mean": 0.9}
            folders.append(
                make([], seed, [0.5], protocol="global", measured={"auroc": 0.7}, also={"global_local": 0.4})
            )
            folders.append(make(["ditto"], seed, [0.6], protocol="personal", measured=own, also={"global": 0.55}))
        for number, folder in enumerate(folders):
            summary = json.loads((folder / "summary.json").read_text())
            summary["time"] = {"peak_memory_mib": 100.0 + number}
            summary["bytes"] = {"down": 3_000_000, "up": 1_000_000}
            summary["reports"] = {"dp": {"epsilon": 2.0 + number}} if number % 2 else {}
            (folder / "summary.json").write_text(json.dumps(summary))
            line = json.loads((folder / "metrics.jsonl").read_text())
            lines = [
                line | {"round": n, "time": {"round": t, "evaluation": 0.5}} for n, t in enumerate((9.0, 1.0, 4.0))
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
            seal(folder)
        return folders

    def test_personal_stands_beside_global(self, folders, cli):
        asked = ("--protocol", "personal", "--protocol", "global", "--columns", "accuracy,auroc,auroc_mean,MB")
        text = cli("compare", *folders, *asked, "--format", "markdown").stdout
        assert text.splitlines()[0] == (
            "| method | personal: accuracy % | personal: auroc | personal: auroc_mean | global: accuracy % | "
            "global: auroc | MB |"
        )
        rows = {line.split(" | ")[0]: line.strip("|").split(" | ")[1:] for line in text.splitlines()[2:4]}
        assert [cell.split(" ")[0] for cell in rows["| ditto"]] == ["60.00", "0.8100", "0.9000", "55.00", "-", "4.00"]
        assert [cell.split(" ")[0] for cell in rows["| fedavg"]] == ["40.00", "-", "-", "50.00", "0.7000", "4.00"]
        assert "- personal: Highest mean accuracy: ditto with 60.00 %." in text
        assert "--protocol personal" not in text, "a note asks for what is there"
        both = list(csv.DictReader(io.StringIO(cli("compare", *folders, *asked[:4], "--format", "csv").stdout)))
        assert [(row["protocol"], row["row"]) for row in both] == [
            (protocol, name) for protocol in ("personal", "global") for name in ("fedavg", "ditto")
        ]
        frame = fedcore_study.compare(folders, protocol=["personal", "global"])
        assert frame.loc[("personal", "ditto"), "accuracy_mean"] == pytest.approx(0.6)
        assert frame.loc[("global", "ditto"), "accuracy_mean"] == pytest.approx(0.55)

    def test_latex_of_two_protocols_has_their_names_above_their_columns(self, folders, cli):
        asked = ("--protocol", "personal", "--protocol", "global", "--columns", "accuracy", "--columns", "costs")
        named = ("--caption", "Two & more", "--tex-label", "tab:main")
        text = cli("compare", *folders, *asked, *named, "--latex").stdout
        assert r"\usepackage{booktabs}." in text
        assert "\\caption{Two \\& more}\n\\label{tab:main}\n\\small" in text
        first, *others = text.split(r"\begin{tabular}")[1:]
        assert "\n & \\multicolumn{1}{c}{personal} & \\multicolumn{1}{c}{global} & &  \\\\\n" in first
        assert r"\cmidrule(lr){2-2} \cmidrule(lr){3-3}" in first
        assert not any("personal" in part for part in others)
        for part in (first, *others):
            body = part.partition(r"\toprule")[2].partition(r"\bottomrule")[0]
            counts = {line.count(" &") + line.startswith("& ") for line in body.splitlines() if line.endswith(r"\\")}
            assert counts == {part.partition("}")[0].count("r")}

    def test_costs(self, folders):
        """Seconds per round are the mean without the first of several rounds: (1.5 + 4.5) / 2."""
        found, _ = join(folders, columns=["costs"])
        fedavg, ditto = found.blocks[0].rows
        heads = ["method", "s/round", "seconds", "MB down", "MB up", "MiB", "epsilon"]
        assert headings(found, found.blocks[0]) == heads
        costs = {name: figure and figure.mean for name, figure in ditto.costs.items()}
        assert costs == {
            "s/round": 3.0,
            "seconds": 15.5,
            "MB": 4.0,
            "MB-down": 3.0,
            "MB-up": 1.0,
            "memory": 103.0,
            "epsilon": 5.0,
        }
        assert fedavg.costs["epsilon"] is None
        frame = fedcore_study.compare(folders)
        assert frame.loc["ditto", ["seconds", "cost_seconds", "cost_MB-up"]].tolist() == [3.0, 15.5, 1.0]
        after, _ = join(folders, columns=["seconds,MB"], round=2)
        assert after.blocks[0].rows[0].costs["seconds"].mean == 11.0
        assert after.blocks[0].rows[0].costs["MB"].mean == pytest.approx(600e-6)
        report = build(find_runs(folders, print), [], title="t", points=0)
        (bars,) = (chart for _, chart in report.charts if chart.name == "seconds")
        assert sum(part.values[1] for part in bars.parts) == pytest.approx(3.0), "the report has the same seconds"

    def test_no_number_is_cut(self, folders, cli, monkeypatch):
        asked = ("compare", *folders, "--protocol", "personal", "--protocol", "global", "--columns", "difference,costs")
        monkeypatch.setenv("COLUMNS", "60")
        narrow = cli(*asked).stdout
        assert max(len(line) for line in narrow.partition("personal: ")[0].splitlines()) <= 60
        names = re.findall(r"^ (method|ditto) ", narrow, re.MULTILINE)
        assert names == ["method", "ditto"] * (len(names) // 2)
        assert len(names) > 2, "one table in several parts"
        monkeypatch.delenv("COLUMNS")
        free = cli(*asked).stdout
        assert len(re.findall(r"^ ditto ", free, re.MULTILINE)) == 1
        for text in (narrow, free):
            assert "…" not in text
            assert "+20.00 " in text
            assert "103 ± 2" in text

    def test_a_column_that_nothing_has(self, folders, cli):
        with raises(UnknownNameError, "'aurc'", "'auroc'"):
            join(folders, columns=["accuracy,aurc"])
        with raises(ConfigError, "'dp.delta'"):
            join(folders, columns=["dp.delta"])
        refused = cli("compare", *folders, "--wide", "--columns", "accuracy")
        assert (refused.exit_code, "leave out --columns\n" in refused.stderr) == (2, True)


def test_clients_that_could_not_be_measured_are_told(make):
    def folders(counts):
        return [
            make([name] * bool(name), seed, [0.5], protocol="personal", measured={"clients": clients})
            for name, numbers in counts.items()
            for seed, clients in enumerate(numbers)
        ]

    def notes(counts):
        return [n for n in compare_runs(find_runs(folders(counts), print), protocol="personal").notes if "clients" in n]

    assert notes({"": (3, 4), "moon": (3, 4)}) == []
    (note,) = notes({"": (3, 4), "moon": (3, 2)})
    assert note.startswith("the rows are measured on different numbers of clients (fedavg: 3, 4; moon: 3, 2). ")


class TestLatex:
    """Computer Modern's widths are those of matplotlib's file cmr10; the letters of 9 pt are 3 % wider than these."""

    ROW_END = r" \\"

    @pytest.fixture
    def width(self):
        mpl = pytest.importorskip("matplotlib")
        from matplotlib.ft2font import FT2Font

        fonts = {}
        for bold, name in enumerate(("cmr10", "cmb10")):
            fonts[bold] = FT2Font(str(Path(mpl.get_data_path(), "fonts", "ttf", f"{name}.ttf")))
            fonts[bold].set_size(100, 72)

        def of(cell):
            bold = cell.startswith(r"\textbf")
            plain = re.sub(
                r"\$(.*?)\$", lambda math: "+" if math[1] in (r"\pm", "-") else math[1], cell
            )  # as wide as +
            plain = re.sub(r"^\\(textbf|multicolumn\{\d\}\{c\})", "", plain).replace("\\", "")
            letters = re.sub("[{}]", "", plain)
            wide = [fonts[bold].load_char(ord(letter)).linearHoriAdvance / 65536 / 100 for letter in letters]
            return 9 * 1.03 * (1.15 if bold else 1) * sum(wide)  # LaTeX's bold is the extended one

        return of

    def widths(self, text, width):
        """Return the width of each tabular: its widest cells, and 4 pt on both sides of each column."""
        found = []
        for part in text.split(r"\begin{tabular}")[1:]:
            lines = [line.removesuffix(self.ROW_END) for line in part.splitlines() if line.endswith(self.ROW_END)]
            rows = [line.split(" & ") for line in lines if r"\multicolumn" not in line]
            stacked = [
                [re.sub(r"^\\shortstack\[r\]\{(.*)\}$", r"\1", cell).split(r"\\") for cell in row] for row in rows
            ]
            columns = zip(*stacked, strict=True)
            widest = [max(width(line) for lines in column for line in lines) for column in columns]
            if part.startswith(r"{p{0.4\linewidth}"):
                widest[0] = 0.4 * 345
            found.append(sum(widest) + 8 * len(widest))
        return found

    @pytest.mark.parametrize(
        ("name", "parts"), [("moon", 7), ("a method with a long name, number 100 of them all", 11)]
    )
    def test_no_tabular_is_wider_than_a_line_of_text(self, width, name, parts):
        heads = ["method", "seeds", "accuracy %", "auroc (clients)", "calibration-slope (clients)"]
        heads += [
            "minus fedavg [95 % interval]",
            "p (Holm)",
            "s/round",
            "MB down",
            *(f"Hospital {k}" for k in range(9)),
        ]
        values = ["3", "93.06 ± 0.41", "0.9938 ± 0.0028", "-1.2345 ± 0.1234", "+1.03 [-24.84, +24.84]", "< 0.001"]
        values += ["100.455 ± 10.022", "1234.83 ± 0.00", *["99.9999 ± 99.9999"] * 9]
        rows = [[each, *values] for each in ("fedavg", name)]
        best = [(0, 3), (1, 8), (0, 9), (0, 10), (0, 11)]
        made = tables.Table("", heads, rows, best, groups=[("", 2), ("personal_validation", 7), ("", 9)])
        for text in (made.latex("A caption", "tab:x"), made.latex()):
            found = self.widths(text, width)
            assert max(found) <= 345
            assert len(found) <= parts, "the room is used"
            assert "resizebox" not in text
            for head in ("Hospital 8", r"\shortstack[r]{minus fedavg [95 \%\\interval]}"):
                assert text.count(head) == 1
            assert text.count(r"\multicolumn{") == sum("personal" in part for part in text.split("tabular")[1::2])

    def test_signs_that_the_font_has_others_for_are_mathematics(self):
        assert tables.latex_text("a|b < c") == "a$|$b $<$ c", "LaTeX prints a dash for |"

    def test_a_narrow_table_is_one_tabular(self, width):
        text = tables.Table("Title", ["method", "seeds"], [["fedavg", "3"], ["[moon]", "3"]]).latex()
        assert len(self.widths(text, width)) == 1
        assert text.startswith("% Title\n{\\small")
        assert "\n{}[moon] & 3 \\\\\n" in text, "LaTeX would take it for an option of the end of the row above"
