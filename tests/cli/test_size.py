"""`flipper size`: the trials of Leveugle et al., DATE 2009, equation for n, and the margin they give."""

import math

import pytest
from cli_tools import here, rows_of
from scipy.stats import norm

RESNET50, RESNET18, SMALL = 800_000_000, 11_689_512 * 32, 320_000
"""Bits of 25 M, 11.7 M and 10 k float32 parameters."""

PUBLISHED = [
    (RESNET50, 0.05, 385, 664), (RESNET50, 0.03, 1068, 1843), (RESNET50, 0.01, 9604, 16587),
    (RESNET18, 0.05, 385, 664), (RESNET18, 0.03, 1068, 1843), (RESNET18, 0.01, 9604, 16587),
    (SMALL, 0.05, 384, 663), (SMALL, 0.03, 1064, 1833), (SMALL, 0.01, 9325, 15770),
    (RESNET50, 0.001, 959_249, 1_655_255), (RESNET18, 0.001, 957_941, 1_651_364), (SMALL, 0.001, 240_026, 268_249),
]  # fmt: skip
"""Population, margin, trials at 95 % and at 99 %, for t = 1.96 and 2.5758, rounded up."""


def trials(*arguments):
    (row,) = rows_of("size", *arguments)
    return row["trials"]


@pytest.mark.parametrize(("population", "margin", "at_95", "at_99"), PUBLISHED)
def test_published_values(population, margin, at_95, at_99):
    arguments = ["--population", population, "--margin", margin]
    assert trials(*arguments) == at_95
    assert trials(*arguments, "--confidence", 0.95) == at_95
    assert trials(*arguments, "--confidence", 0.99) == at_99


def by_hand(population, margin, quantile, proportion=0.5):
    needed = population / (1 + margin**2 * (population - 1) / (quantile**2 * proportion * (1 - proportion)))
    return math.ceil(needed)


@pytest.mark.parametrize("proportion", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("population", [1, 2, 1000, 965_888])
def test_the_equation(population, proportion):
    found = trials("--population", population, "--margin", 0.02, "--proportion", proportion)
    assert found == min(population, by_hand(population, 0.02, 1.96, proportion))


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.998, 0.9999, 1e-6])
def test_other_confidences_follow_the_normal_distribution(confidence):
    """The cut-off point has four decimals, as the paper gives it (3.0902 for 99.8 %); exact ones move n that little."""
    exact = by_hand(10**9, 0.01, norm.ppf((1 + confidence) / 2))
    assert trials("--population", 10**9, "--margin", 0.01, "--confidence", confidence) == pytest.approx(exact, rel=2e-4)


def test_the_record():
    (row,) = rows_of("size", "--population", 965_888, "--margin", 0.01)
    assert row == {
        "population": 965_888, "confidence": 0.95, "proportion": 0.5, "strata": 1, "margin": 0.01,
        "trials_per_stratum": 9510, "trials": 9510,
    }  # fmt: skip


def test_each_stratum_needs_its_own():
    """Each of S parts, of which a claim is made, is a population of N/S."""
    (row,) = rows_of("size", "--population", 3_200_000, "--strata", 10, "--margin", 0.03)
    assert (row["trials_per_stratum"], row["trials"]) == (1064, 10_640)


@pytest.mark.parametrize("strata", [1, 4])
def test_trials_give_the_margin_back(strata):
    (there,) = rows_of("size", "--population", 10**6, "--margin", 0.02, "--strata", strata)
    (back,) = rows_of("size", "--population", 10**6, "--trials", there["trials"], "--strata", strata)
    assert back["margin"] <= 0.02
    assert back["margin"] == pytest.approx(0.02, rel=1e-3)
    assert back["trials_per_stratum"] == there["trials_per_stratum"]


def test_a_census_has_no_error():
    assert rows_of("size", "--population", 500, "--trials", 500)[0]["margin"] == 0


@pytest.mark.parametrize(("arguments", "message"), [
    (["--margin", "0"], "--margin: 0.0 is not between 0 and 1"),
    (["--margin", "nan"], "--margin: nan is not between 0 and 1"),
    (["--confidence", "1"], "--confidence: 1.0 is not between 0 and 1"),
    (["--proportion", "0"], "--proportion: 0.0 is not between 0 and 1"),
    (["--strata", "101"], "--strata: 101 are more than the population, 100"),
    (["--trials", "101"], "--trials: 101 is not between 1 and the population, 100"),
    (["--trials", "3", "--strata", "4"], "--trials: 3 are fewer than the 4 strata"),
    (["--trials", "3", "--margin", "0.1"], "--margin and --trials exclude each other: one is the answer"),
])  # fmt: skip
def test_what_makes_no_sense_is_wrong_usage(arguments, message):
    assert here("size", "--population", 100, *arguments) == (2, "", f"flipper: error: {message}\n")


def test_populations_beyond_any_machine_word():
    assert trials("--population", 10**40) == 385
