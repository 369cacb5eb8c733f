"""The report's numbers, on made-up results with known answers; oracles are statsmodels, scipy and reckoning by hand."""

import itertools
from pathlib import Path

import pytest
from scipy.stats import binomtest
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from flipper.campaigns.cells import trial_seed
from flipper.campaigns.folder import settle
from flipper.campaigns.record import RunRecord
from flipper.campaigns.results import Results, load_results
from flipper.campaigns.spec import spec_of
from flipper.campaigns.store import Store
from flipper.campaigns.summary import summary

RESIDENT = [{"parameters": 1000, "gradients": 1000, "buffers": 0, "optimizer": 2000}]

HARMED = {
    ("ddp:2", "sign"): {1, 2, 3}, ("ddp:2", "exponent"): set(range(12)), ("ddp:2", "mantissa"): set(),
    ("pipeline:2", "sign"): {1}, ("pipeline:2", "exponent"): set(range(5, 14)), ("pipeline:2", "mantissa"): set(),
}  # fmt: skip
"""Which of thirty trials did harm."""


@pytest.fixture
def results(tmp_path: Path) -> Results:
    campaign_table = {
        "name": "made", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2, "trials": 30, "null_trials": 8,
        "training_seeds": [1, 2], "fit": 100.0,
    }  # fmt: skip
    axes = {"parallel": ["ddp:2", "pipeline:2"], "bits": ["sign", "exponent", "mantissa"], "count": 1}
    spec = spec_of({"campaign": campaign_table, "axes": axes})
    campaign = settle(spec, tmp_path)
    population = {"sign": 100, "exponent": 800, "mantissa": 2300}
    with Store(campaign.folder.results(), write=True) as store:
        for parallel, seed in itertools.product(("ddp:2", "pipeline:2"), (1, 2)):
            usual = {"fingerprint": "f", "first_step": 0, "last_step": 20, "evals": [(10, 1.0, 0.9), (20, 1.0, 0.9)],
                     "loss": 1.0, "metric": 0.9, "max_abs_parameter": 1.0, "state_digest": "s", "resume_digest": "r",
                     "resident": RESIDENT * 2}  # fmt: skip
            store.add(RunRecord("golden", parallel, seed, **usual), RunRecord("control", parallel, seed, **usual))
            for number in range(seed - 1, 8, 2):
                gap = 0.01 if number < 4 else 0.0
                store.add(RunRecord(
                    "null", parallel, seed, trial=number, fingerprint="f", first_step=10, loss=1.0,
                    evals=[(20, 1.0, 0.9 - gap)],
                ))  # fmt: skip
        for cell in campaign.cells:
            for trial in range(30):
                bad = trial in HARMED[cell.parallel, cell.axes["bits"]]
                store.add(RunRecord(
                    "trial", cell.parallel, spec.training_seeds[trial % 2], cell=cell.number, trial=trial,
                    seed=trial_seed(spec, cell, trial), fingerprint="f", first_step=10, last_step=20,
                    evals=[(20, 1.0, 0.5 if bad else 0.9)], loss=1.0, metric=0.5 if bad else 0.9,
                    max_abs_parameter=1.0, resume_digest="x", population=population[cell.axes["bits"]],
                    detected=[("loss-spike", 12, 0)] if bad and trial % 2 else [],
                ))  # fmt: skip
    return load_results(campaign)


def test_each_cell_has_its_counts_and_intervals(results: Results) -> None:
    for cell in summary(results)["cells"]:
        harmed = len(HARMED[cell["parallel"], cell["bits"]])
        degraded = cell["outcomes"]["degraded"]
        assert (cell["trials"], degraded["count"], cell["not_benign"]["count"]) == (30, harmed, harmed)
        wilson = proportion_confint(harmed, 30, 0.05, "wilson")
        exact = binomtest(harmed, 30).proportion_ci(0.95, "exact")
        assert (degraded["low"], degraded["high"]) == pytest.approx(wilson, abs=1e-9)
        assert (degraded["exact_low"], degraded["exact_high"]) == pytest.approx((exact.low, exact.high), abs=1e-9)
        if not harmed:
            assert degraded["at_most"] == pytest.approx(1 - 0.05 ** (1 / 30))


def test_the_primary_contrast_counts_pairs_of_one_seed(results: Results) -> None:
    primary = summary(results)["primary"]
    pairs = [(n in HARMED["ddp:2", bits], n in HARMED["pipeline:2", bits])
             for bits in ("sign", "exponent", "mantissa") for n in range(30)]  # fmt: skip
    only_a, only_b = pairs.count((True, False)), pairs.count((False, True))
    assert (primary["a"], primary["b"], primary["pairs"]) == ("ddp:2", "pipeline:2", 90)
    assert (primary["only_a"], primary["only_b"]) == (only_a, only_b) == (7, 2)
    assert primary["difference"] == pytest.approx((only_a - only_b) / 90)
    table = [[pairs.count((True, True)), only_a], [only_b, pairs.count((False, False))]]
    by_hand = mcnemar(table, exact=True).pvalue
    assert primary["mcnemar_p"] == pytest.approx(by_hand)
    assert primary["p"] == pytest.approx(by_hand)  # each draw has one pair, so that both are the same test
    assert primary["low"] < primary["difference"] < primary["high"]
    assert primary["equivalent"] is False


def test_training_seeds_have_their_own_values(results: Results) -> None:
    over = summary(results)["primary"]["over_seeds"]
    by_hand = {}
    for place, seed in enumerate((1, 2)):
        gaps = [
            (n in HARMED["ddp:2", bits]) - (n in HARMED["pipeline:2", bits])
            for bits in ("sign", "exponent", "mantissa") for n in range(place, 30, 2)
        ]  # fmt: skip
        by_hand[str(seed)] = sum(gaps) / len(gaps)
    assert over["values"] == pytest.approx(by_hand)
    assert over["one_run"] is False


def test_exploratory_comparisons_are_corrected_together(results: Results) -> None:
    found = summary(results)["comparisons"]
    assert [each["within"]["bits"] for each in found] == ["sign", "exponent", "mantissa"]
    corrected = multipletests([each["p"] for each in found], method="holm")[1]
    assert [each["p_holm"] for each in found] == pytest.approx(list(corrected))
    assert [each["pairs"] for each in found] == [30, 30, 30]


def test_exposure_weighs_cells_by_their_population(results: Results) -> None:
    for entry in summary(results)["exposure"]:
        shares = {"sign": 100 / 3200, "exponent": 800 / 3200, "mantissa": 2300 / 3200}
        probability = sum(share * len(HARMED[entry["parallel"], bits]) / 30 for bits, share in shares.items())
        assert entry["bits_resident"] == 2 * 4000
        assert entry["bits_by_kind"] == {"parameters": 2000, "gradients": 2000, "buffers": 0, "optimizer": 4000}
        assert entry["probability"] == pytest.approx(probability)
        assert entry["rate_per_job_hour"] == pytest.approx(100 * 8000 / 1e6 / 1e9 * probability)
        assert entry["low"] < entry["rate_per_job_hour"] < entry["high"]


def test_detectors_tell_what_they_saw_of_harm(results: Results) -> None:
    (spike,) = summary(results)["detectors"]
    harmed = [n for trials in HARMED.values() for n in trials]
    seen = sum(n % 2 for n in harmed)
    assert (spike["detector"], spike["harmful"]["count"], spike["harmful"]["of"]) == ("loss-spike", seen, len(harmed))
    assert spike["benign"]["count"] == 0
    assert spike["median_steps"] == 2


def test_null_trials_that_set_the_band_do_not_test_it(results: Results) -> None:
    for null in summary(results)["null"]:
        assert null["band"] == pytest.approx(0.01)
        assert (null["null_trials"], null["setting_the_band"], null["tested"]) == (8, 4, 4)
        assert null["false_alarms"]["count"] == 0


def test_another_tolerance_needs_no_new_run(results: Results) -> None:
    from dataclasses import replace

    campaign = results.campaign
    wide = replace(campaign, spec=replace(campaign.spec, tolerance=0.45))
    assert not any(trial.harmful for trial in load_results(wide).trials)


def test_controls_say_that_they_are_identical(results: Results) -> None:
    found = summary(results)["controls"]
    assert len(found) == 4
    assert all(each["identical"] for each in found)


def test_equal_outcomes_everywhere_are_no_proof_of_equality_with_few_pairs(results: Results) -> None:
    from dataclasses import replace

    few = replace(results, trials=[trial for trial in results.trials if trial.cell.axes["bits"] == "mantissa"])
    primary = summary(few)["primary"]
    assert primary["difference"] == 0
    assert primary["p"] == 1
    assert primary["high"] > 0.05
    assert primary["equivalent"] is False
