"""Small campaigns, run for real: controls, pairs, nested doses, saved work, and going on."""

from pathlib import Path

import pytest

from flipper.campaigns.engines import open_engine
from flipper.campaigns.folder import Campaign, open_campaign, settle
from flipper.campaigns.results import Results, load_results, rows
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import Spec, spec_of
from flipper.errors import UsageError


def campaign_of(folder: Path, axes: dict[str, object], **values: object) -> tuple[Spec, Campaign]:
    usual = {"name": "small", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2, "trials": 3, "null_trials": 4}
    spec = spec_of({"campaign": {**usual, **values}, "axes": axes})
    return spec, settle(spec, folder)


def finished(campaign: Campaign, **options: object) -> Results:
    with open_engine("local") as engine:
        run_campaign(campaign, engine, **options)  # type: ignore[arg-type]
    return load_results(campaign, detail=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two layouts, both reaches, two doses, two training seeds."""
    axes = {"parallel": ["ddp:2", "pipeline:2"], "count": [1, 100], "reach": ["all", "one"], "role": "parameter"}
    _, campaign = campaign_of(
        tmp_path_factory.mktemp("campaign"), axes, training_seeds=[1, 2], evaluate_every=8, seed=5
    )
    return finished(campaign)


def test_each_layout_and_training_seed_has_a_golden_run_and_an_equal_control(results: Results) -> None:
    goldens = {(run.parallel, run.training_seed): run for run in results.goldens.values()}
    assert sorted(goldens) == [("ddp:2", 1), ("ddp:2", 2), ("pipeline:2", 1), ("pipeline:2", 2)]
    assert len(results.controls) == 4
    for control in results.controls:
        golden = goldens[control.parallel, control.training_seed]
        assert (control.state_digest, control.resume_digest) == (golden.state_digest, golden.resume_digest)
        assert golden.first_step == 0 < control.first_step


def test_every_trial_has_a_row_with_all_columns(results: Results) -> None:
    listed = list(rows(results))
    assert len(listed) == 8 * 3
    assert {"cell", "parallel", "count", "reach", "trial", "training_seed", "seed", "outcome", "group", "metric_final",
            "metric_golden", "loss_final", "max_excursion", "steps_to_recover", "area", "state_distance", "spiked",
            "nonfinite_state", "struck_nonfinite", "replicas_diverged", "first_detector", "first_detected_step",
            "stopped_early", "seconds", "state_digest", "fingerprint", "error"} <= set(listed[0])  # fmt: skip
    assert len({row["seed"] for row in listed}) == 3  # one a trial number, whatever the cell


def test_layouts_are_struck_alike_and_doses_nest(results: Results) -> None:
    struck = {
        (t.cell.parallel, t.cell.axes["count"], t.run.trial): {(f[0], f[1], tuple(f[2])) for f in t.run.faults}
        for t in results.trials
    }
    for trial in range(3):
        assert struck["ddp:2", 1, trial] == struck["pipeline:2", 1, trial]
        assert struck["ddp:2", 100, trial] == struck["pipeline:2", 100, trial]
        places = {(name, flat) for name, flat, _ in struck["ddp:2", 100, trial]}
        assert {(name, flat) for name, flat, _ in struck["ddp:2", 1, trial]} <= places
        assert len(places) > 90


def test_one_copy_is_struck_only_where_there_are_several(results: Results) -> None:
    digests = {(t.cell.parallel, t.cell.axes["count"], t.cell.reach, t.run.trial): t.run for t in results.trials}
    for count in (1, 100):
        for trial in range(3):
            one, every = digests["pipeline:2", count, "one", trial], digests["pipeline:2", count, "all", trial]
            assert one.state_digest == every.state_digest
            assert (one.reach, one.reused is None) != (every.reach, every.reused is None)  # run once
            apart = digests["ddp:2", count, "one", trial]
            assert apart.reach == "one"
            assert apart.reused is None


def test_a_trial_is_what_inject_and_train_make_by_hand(results: Results, tmp_path: Path) -> None:
    from flipper import draw, inject
    from flipper.training.layouts import Parallel
    from flipper.training.run import train
    from flipper.training.spec import TrainSpec

    chosen = next(t for t in results.trials if t.cell.parallel == "ddp:2" and t.cell.axes["count"] == 100)
    golden = results.campaign.folder.golden(chosen.run.fingerprint, "ddp:2", chosen.run.training_seed)
    clean = next(golden.glob("clean.*"))
    altered = tmp_path / clean.name
    inject(clean, altered, draw(clean, chosen.cell.model, chosen.run.seed))
    by_hand = train(TrainSpec("digits-mlp", Parallel.parse("ddp:2"), resume=altered, epochs=2))
    assert by_hand.state_digest == chosen.run.state_digest
    assert by_hand.accuracy == chosen.run.metric


def test_a_trial_can_be_run_again(results: Results) -> None:
    from flipper.campaigns.again import run_again

    again = run_again(open_campaign(results.campaign.folder.path), 2, 1, keep=True)
    assert again["as_stored"] is True
    kept = sorted(path.name for path in Path(again["kept"]).iterdir())
    assert kept == ["clean.safetensors", "clean.safetensors.flipper.json", "record.json"]


def test_going_on_with_more_trials_and_axis_values_leaves_old_results(results: Results) -> None:
    before = {(row["cell"], row["trial"]): row for row in rows(results)}
    folder = results.campaign.folder.path
    spec = results.campaign.spec
    from dataclasses import replace

    from flipper.campaigns.spec import Slice

    axes = {**spec.slices[0].axes, "count": (1, 10, 100), "reach": ("all",), "parallel": ("ddp:2",)}
    grown = settle(replace(spec, slices=(*spec.slices, Slice(axes, 4))), folder)
    after = {(row["cell"], row["trial"]): row for row in rows(finished(grown))}
    assert {key: after[key] for key in before} == before
    assert len(after) - len(before) == 4 + 2 * 1  # a new cell of 4, and one more trial in two old ones


def test_a_spec_that_contradicts_results_is_refused(results: Results) -> None:
    from dataclasses import replace

    with pytest.raises(UsageError, match="seed = 5, the spec now says 6"):
        settle(replace(results.campaign.spec, seed=6), results.campaign.folder.path)
    fewer = replace(results.campaign.spec, slices=results.campaign.spec.slices[:0])
    with pytest.raises(UsageError, match="the spec no longer has"):
        settle(fewer, results.campaign.folder.path)


def test_runs_whose_future_is_known_end_early_and_an_audit_agrees(tmp_path: Path) -> None:
    slices = [
        {"bits": "exponent-msb", "effect": "set0", "count": [1, 5000]},  # 0 in every weight below 2: changes nothing
        {"effect": "scale:1e60", "count": 6570},  # every weight becomes infinite
    ]
    usual = {"name": "small", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2, "trials": 2, "tolerance": 0.05}
    spec = spec_of({"campaign": usual, "axes": {"parallel": "single", "role": "parameter"}, "slices": slices})
    found = finished(settle(spec, tmp_path), audit=1.0)
    by_count = {(t.cell.axes["count"], t.run.trial): t for t in found.trials}
    same, lost = by_count[5000, 1], by_count[6570, 0]
    assert (same.judgement.outcome, same.run.ended) == ("identical", "identical")
    assert same.run.last_step - same.run.first_step == 1
    assert same.run.metric == same.golden.metric
    assert (lost.judgement.outcome, lost.run.ended) == ("non-finite", "non-finite")
    assert lost.run.last_step - lost.run.first_step == 1
    assert len(found.audits) == 6
    assert all(audit.ended == "completed" for audit in found.audits)


def test_equal_plans_are_run_once_and_a_margin_stops_a_cell(tmp_path: Path) -> None:
    axes = {"parallel": "single", "role": "parameter", "layer": "fc3.bias", "bits": "0"}
    spec = spec_of({
        "campaign": {"name": "m", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2, "margin": 0.1,
                     "tolerance": 0.05},
        "axes": axes,
    })  # fmt: skip
    found = finished(settle(spec, tmp_path))
    runs = [trial.run for trial in found.trials]
    assert [run.trial for run in runs] == list(range(50))  # a lowest mantissa bit harms nothing: the first look stops
    assert not any(trial.harmful for trial in found.trials)
    plans = {(run.faults[0][0], run.faults[0][1]) for run in runs}
    assert sum(run.reused is None for run in runs) == len(plans) < 50
    from flipper.campaigns.summary import summary

    (cell,) = summary(found)["cells"]
    assert cell["stopping"]["stop"] is True
    assert cell["stopping"]["coverage"] >= 0.95


def test_a_census_strikes_each_bit_once(tmp_path: Path) -> None:
    axes = {"parallel": "single", "layer": "fc3.bias", "bits": "sign"}
    _, campaign = campaign_of(tmp_path, axes, trials="all", tolerance=0.05)
    found = finished(campaign)
    size = found.trials[0].run.population
    assert len(found.trials) == size == 10
    assert len({tuple(map(str, trial.run.faults[0][:3])) for trial in found.trials}) == size
    from flipper.campaigns.summary import summary

    numbers = summary(found)
    (cell,) = numbers["cells"]
    for share in (cell["not_benign"], *cell["outcomes"].values()):  # nothing was sampled, so nothing is uncertain
        assert share["low"] == share["proportion"] == share["high"]
    (exposed,) = numbers["exposure"]
    assert exposed["low"] == exposed["rate_per_job_hour"] == exposed["high"]
