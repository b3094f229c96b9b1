"""Tests of differences against tables, published examples and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedcore_study.comparisons.figures import corrected, paired_difference
from fedcore_study.comparisons.significance import MOST_SEEDS, holm, p_text, paired_p, power, ranked, seeds_needed


def test_the_paired_t_test_is_scipys():
    one, other = [0.61, 0.65, 0.58, 0.70], [0.60, 0.61, 0.59, 0.66]
    differences = np.subtract(one, other)
    expected = stats.ttest_rel(one, other).pvalue
    assert paired_p(differences.mean(), differences.std(ddof=1), 4) == pytest.approx(expected)
    found = paired_difference(dict(enumerate(one)), dict(enumerate(other)))
    assert found.p == pytest.approx(expected)
    assert found.std == pytest.approx(differences.std(ddof=1))


def test_equal_differences_have_no_p_value():
    """Three seeds that differ by two of 360 test images each: the computed deviation is a rounding error."""
    other = {0: 320 / 360, 1: 331 / 360, 2: 298 / 360}
    found = paired_difference({seed: value - 2 / 360 for seed, value in other.items()}, other)
    assert found.mean == pytest.approx(-2 / 360)
    assert (found.low, found.high, found.p, corrected({"a": found}, 0.95)["a"]) == (None, None, None, found)
    assert (paired_p(0.1, 0.0, 3), paired_p(0.0, 0.0, 3), paired_p(1e-17, 1e-17, 3)) == (None, 1.0, 1.0)


def test_holm_by_hand():
    """0.01 * 4, 0.02 * 3, then 0.03 * 2 = 0.06 and 0.04, which is raised to its predecessor."""
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.02}) == pytest.approx(
        {"a": 0.06, "b": 0.04, "c": 0.06, "d": 0.06}
    )
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_the_seeds_of_published_tables(effect, seeds):
    """G*Power 3.1: paired t-test, two-sided, level 0.05, power 0.8."""
    assert seeds_needed(effect, 0.05) == seeds_needed(-effect, 0.05) == seeds


def test_the_power_is_that_of_a_simulation():
    draws = np.random.default_rng(0).normal(1.2, 1.0, (20_000, 8))
    found = np.mean(stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.01)
    assert power(1.2, 8, 0.01) == pytest.approx(found, abs=0.01)


def test_tiny_and_huge_effects():
    assert seeds_needed(0.01, 0.05) is None
    assert seeds_needed(0.0, 0.05) is None
    assert 2 <= seeds_needed(1e6, 0.05) <= 3
    assert power(0.1, MOST_SEEDS, 0.05) > 0.8


def test_the_seeds_are_those_for_all_comparisons_of_a_table():
    base = dict.fromkeys(range(5), 0.0)
    one = paired_difference({0: 0.01, 1: 0.03, 2: 0.0, 3: 0.02, 4: -0.01}, base)
    alone = corrected({"a": one}, 0.95)["a"]
    assert alone.seeds == seeds_needed(one.mean / one.std, 0.05)
    (among, *_) = corrected({"a": one, "b": one, "c": None}, 0.95).values()
    assert among.seeds == seeds_needed(one.mean / one.std, 0.025) > alone.seeds
    few = paired_difference({0: 0.01, 1: 0.03}, base)
    assert corrected({"a": few}, 0.95)["a"] == few


DEMSAR = [
    (0.763, 0.768, 0.771, 0.798),
    (0.599, 0.591, 0.590, 0.569),
    (0.954, 0.971, 0.968, 0.967),
    (0.628, 0.661, 0.654, 0.657),
    (0.882, 0.888, 0.886, 0.898),
    (0.936, 0.931, 0.916, 0.931),
    (0.661, 0.668, 0.609, 0.685),
    (0.583, 0.583, 0.563, 0.625),
    (0.775, 0.838, 0.866, 0.875),
    (1.000, 1.000, 1.000, 1.000),
    (0.940, 0.962, 0.965, 0.962),
    (0.619, 0.666, 0.614, 0.669),
    (0.972, 0.981, 0.975, 0.9749),  # printed as 0.975 with rank 3
    (0.957, 0.978, 0.946, 0.970),
]
"""Demsar 2006, table 6: AUC of C4.5 on 14 data sets, without and with tuning of m, cf, and both."""


def test_ranks_of_demsars_example():
    tables = [dict(zip(("C4.5", "m", "cf", "both"), row, strict=True)) for row in DEMSAR]
    found = ranked(tables, 0.05)
    assert found.tables == 14
    assert found.average == pytest.approx({"C4.5": 3.143, "m": 2.0, "cf": 2.893, "both": 1.964}, abs=5e-4)
    assert found.critical == pytest.approx(1.25, abs=0.005)
    assert ranked(tables, 0.10).critical == pytest.approx(1.12, abs=0.005)
    assert found.p == pytest.approx(stats.friedmanchisquare(*np.array(DEMSAR).T).pvalue)
    assert 0.01 < found.p < 0.026  # the paper's 9.28 without a correction for ties is p = 0.026
    assert "finds a difference (p = 0.0" in str(found)
    assert "less than 1.25 are not significantly different (Nemenyi)" in str(found)


def test_ranks_need_two_tables_and_three_methods_that_are_in_all():
    three = {"a": 0.1, "b": 0.2, "c": 0.3}
    assert ranked([], 0.05) is ranked([three], 0.05) is ranked([three, {"a": 1.0, "b": 2.0}], 0.05) is None
    found = ranked([{**three, "d": 0.9}, {"b": 0.2, "a": 0.2, "c": 0.1}], 0.05)
    assert found.average == {"a": 2.25, "b": 1.75, "c": 2.0}
    assert str(found).endswith(" Not ranked, for not every setting has them: d.")
    alike = ranked([{"a": 1.0, "b": 1.0, "c": 1.0}] * 2, 0.05)
    assert alike.p == 1.0
    assert "finds no difference between the methods (p = 1.000)" in str(alike)


def test_p_values_as_papers_print_them():
    assert [p_text(p) for p in (0.0, 0.0004, 0.012, 1.0)] == ["p < 0.001", "p < 0.001", "p = 0.012", "p = 1.000"]
