"""The study of combinations: its statistics against scipy's, its guess, and the page that the evidence gives."""

import csv
import itertools
import runpy
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from fedcore_study.sweeps.spec import read_spec

ROOT = Path(__file__).parents[2]
GAINS = np.array([[1.0, 3.0, 2.5], [4.0, 4.5, 6.0], [-2.0, 0.5, -1.0], [0.2, 0.1, 0.9]])
"""Made up: four base methods, three seeds."""


@pytest.fixture(scope="module")
def study():
    return runpy.run_path(str(ROOT / "benchmarks" / "combinations" / "study.py"))


def test_a_main_effect_is_tested_over_the_means_of_the_seeds(study):
    found, expected = study["main_effect"](GAINS), stats.ttest_1samp(GAINS.mean(axis=0), 0)
    interval = expected.confidence_interval()
    assert (found.mean, found.low, found.high) == pytest.approx((GAINS.mean(), interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)


def test_the_gain_on_one_base_is_the_paired_t_test(study):
    (found,) = study["cell_effects"](GAINS[:1])
    assert found.p == pytest.approx(stats.ttest_1samp(GAINS[0], 0).pvalue)


def test_the_variance_of_a_gain_is_pooled_over_the_bases(study):
    found = study["cell_effects"](GAINS)
    assert [each.mean for each in found] == pytest.approx(GAINS.mean(axis=1))
    # With the seeds' effects alone there are as many degrees of freedom as for the mean of the bases ...
    common = GAINS[:1] + np.array([[0.0], [5.0], [-3.0]])
    (first, *_) = study["cell_effects"](common)
    assert first.p == pytest.approx(stats.ttest_1samp(common[0], 0).pvalue)
    # ... and the squared error is the mean variance of the bases, divided by the seeds.
    of_seeds, rest = study["mean_squares"](GAINS)
    assert (of_seeds + 3 * rest) / 4 == pytest.approx(GAINS.var(axis=1, ddof=1).mean())


def test_an_interaction_of_two_bases_is_the_paired_t_test_of_their_gains(study):
    (found,) = study["interactions"](GAINS[:2])
    expected = stats.ttest_rel(GAINS[1], GAINS[0])
    interval = expected.confidence_interval()
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, expected.pvalue))


def test_the_error_of_interactions_is_that_of_a_randomised_block_design(study):
    """Friedman's test has the same blocks: with ranks for gains its statistic follows from the squares."""
    ranks = np.apply_along_axis(stats.rankdata, 0, GAINS)
    _, rest = study["mean_squares"](ranks)
    bases, seeds = ranks.shape
    between = seeds * ((ranks.mean(axis=1) - ranks.mean()) ** 2).sum()
    within = rest * (bases - 1) * (seeds - 1)
    expected = stats.friedmanchisquare(*ranks).statistic
    assert between / ((between + within) / (seeds * (bases - 1))) == pytest.approx(expected)


def test_holms_correction_is_scipys_by_closed_testing(study):
    effects = {name: study["Effect"](0, 0, 0, value) for name, value in zip("abcd", (0.02, 0.01, 0.04, 0.5))}
    expected = {}
    for name in effects:  # the largest Bonferroni p-value of the sets of hypotheses that hold this one
        sets = [s for n in range(1, 5) for s in itertools.combinations("abcd", n) if name in s]
        expected[name] = max(min(1.0, len(s) * min(effects[each].p for each in s)) for s in sets)
    assert study["corrected"](effects) == pytest.approx(expected)


def made_up(study, effects, noise=0.0):
    """Return the cells of a data set in which effects add up, but for those of pairs that ``effects`` names."""
    cells = {}
    for base in study["BASES"]:
        for addition in (None, *study["ADDITIONS"]):
            name = study["plugins"](base, addition)
            if name:
                generator = np.random.default_rng(sum(map(ord, name)))
                value = 70 + sum(effects.get(part, 0.0) for part in {*name.split("+"), name})
                cells[name] = {seed: value + seed + noise * generator.normal() for seed in study["SEEDS"]}
    return cells


@pytest.fixture
def guess(study):
    return study["read_guess"](ROOT / "lab" / "guess-combinations.csv")["digits"]


def test_a_planted_interaction_is_found_and_no_other(study, guess):
    cells = made_up(study, {"uscc": 5, "fedprox": 2, "scaffold+fedavgm": -20}, noise=0.2)
    found = study["Study"](cells, guess)
    assert found.main["USCC"].mean == pytest.approx(5, abs=0.5)
    assert [name for name, value in found.beyond_p.items() if value < 0.01] == ["SCAFFOLD + FedAvgM"]
    assert found.beyond["SCAFFOLD + FedAvgM"].mean == pytest.approx(-20, abs=1)
    text = study["tables"](found)
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[3:] for line in text.splitlines()}
    assert rows["FedAvgM"][0].startswith("0, 1, ")
    assert rows["FedAvgM"][2].startswith("SCAFFOLD -")
    assert rows["USCC"][0].startswith("12, 0, ")
    assert "Pairs that hurt** (gain over the base, significant): SCAFFOLD + FedAvgM -" in text
    assert "Less than the sum:** SCAFFOLD + FedAvgM -" in text
    assert "More than the sum:** none" in text
    for beyond in (False, True):
        picture = study["heat_map"](found, "Made up", beyond=beyond)
        ElementTree.fromstring(picture)  # noqa: S314
        bold = [line for line in picture.splitlines() if 'font-weight="bold">-' in line]
        assert [float(line.split(">")[1].split("<")[0]) for line in bold] == [pytest.approx(-20, abs=1)]


def test_a_pair_of_terms_is_one_interaction(study, guess):
    beyond = study["Study"](made_up(study, {}, noise=1), guess).beyond
    assert ("MOON + FedProc" in beyond) != ("FedProc + MOON" in beyond)
    names = [study["plugins"](*name.split(" + ")) for name in beyond]
    assert len(names) == len(set(names))


def test_a_base_without_all_its_runs_has_no_figure(study, guess):
    cells = made_up(study, {}, noise=1)
    del cells["fedcd+uscc"][2]
    found = study["Study"](cells, guess)
    assert found.open == ["FedCD"]
    assert not any("FedCD" in name for name in found.gain)
    text = study["tables"](found)
    assert "Without a figure, for runs of theirs are missing or diverged: FedCD." in text
    assert text.count("FedCD") == 1
    assert study["heat_map"](found, "Made up").count("no figure") == 5  # alone, and with four additions


def test_a_guess_is_judged_by_its_sign(study):
    kinds = [study["verdict"](guess, sign) for guess, sign in ((1, 1), (0.4, 0), (-1, 1), (0.4, -1), (2, 0))]
    assert kinds == [study["KINDS"][place] for place in (0, 0, 1, 2, 3)]


def test_every_cell_has_a_guess_or_is_refused(study):
    with (ROOT / "lab" / "guess-combinations.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            addition = None if line["addition"] == "none" else line["addition"]
            assert (study["plugins"](line["base"], addition) is None) == (line["gain"] == "refused"), line


@pytest.mark.parametrize("data", ["digits", "fashion-mnist"])
def test_each_cell_is_trained_once_on_one_network(study, data, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(
        "subprocess.run", lambda command, **kwargs: started.append(command) or CompletedProcess(command, 0)
    )
    assert study["run"](data, "files", tmp_path) == 0
    trained = [name for command in started for name in command[command.index("--grid") + 1][7:].split(",")]
    cells = {name for base in study["BASES"] for name in study["row"](base)}
    assert len(trained) == len(cells)
    assert set(trained) == cells
    spec = read_spec(Path(started[0][4]))
    assert tuple(spec.seeds) == study["SEEDS"]
    runs = [spec.run({"plugins": name}, 0) for name in trained]
    assert {(run.projection, run.alpha, run.clients, run.rounds) for run in runs} == {(True, 0.1, 20, 30)}


def test_the_page_is_what_the_evidence_gives(study):
    for file, text in study["pages"]().items():
        assert file.read_text(encoding="utf-8") == text, "run: python benchmarks/combinations/study.py page"
        if file.suffix == ".svg":
            ElementTree.fromstring(text)  # noqa: S314
