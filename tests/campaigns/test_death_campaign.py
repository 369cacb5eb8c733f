"""Small campaigns whose ranks die, run for real: the same deaths under every recovery, and what each costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flipper.campaigns.engines import open_engine
from flipper.campaigns.folder import Campaign, open_campaign, settle
from flipper.campaigns.results import Results, load_results, rows
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import spec_of
from flipper.errors import EndedError, UsageError

STEPS, FIRST, EVERY = 44, 22, 8
"""Steps of digits-mlp: of two epochs, of the first, after which trials begin; between checkpoints of a restart."""

TRIALS = 2


def campaign_of(folder: Path, axes: dict[str, Any], **values: Any) -> Campaign:
    usual = {
        "name": "deaths", "fault": "rank-loss", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2,
        "trials": TRIALS, "null_trials": 2, "save_every": EVERY, "evaluate_every": 4,
    }  # fmt: skip
    return settle(spec_of({"campaign": {**usual, **values}, "axes": axes}), folder)


def finished(campaign: Campaign) -> Results:
    with open_engine("local", 4) as engine:
        run_campaign(campaign, engine)
    return load_results(campaign, detail=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    axes = {"parallel": "ddp:3", "recovery": ["restart", "rollback", "lossy"], "deaths": [1, 2]}
    return finished(campaign_of(tmp_path_factory.mktemp("deaths"), axes))


@pytest.fixture(scope="module")
def listed(results: Results) -> dict[tuple[str, int, int], dict[str, Any]]:
    """The exported rows, by recovery, deaths and trial."""
    return {(row["recovery"], row["deaths"], row["trial"]): row for row in rows(results)}


def parsed(kills: str) -> list[tuple[int, int, int | None]]:
    """Rank, step and bucket of each kill, read by hand."""
    found = []
    for kill in kills.split(" "):
        parts = kill.replace("@", ":").split(":")
        found.append((int(parts[1]), int(parts[3]), int(parts[5]) if len(parts) > 4 else None))
    return found


def test_every_recovery_meets_the_same_deaths(listed: dict[Any, dict[str, Any]]) -> None:
    assert len(listed) == 3 * 2 * TRIALS
    for trial in range(TRIALS):
        for deaths in (1, 2):
            kills = {listed[recovery, deaths, trial]["kills"] for recovery in ("restart", "rollback", "lossy")}
            assert len(kills) == 1
        one, two = (set(parsed(listed["lossy", deaths, trial]["kills"])) for deaths in (1, 2))
        assert one < two
        assert len({rank for rank, _, _ in two}) == 2
        assert all(FIRST < step <= STEPS for _, step, _ in two)
    assert len({row["kills"] for row in listed.values()}) == 2 * TRIALS


def test_the_ranks_that_were_to_die_were_lost_in_their_steps(results: Results) -> None:
    for trial in results.trials:
        wanted = sorted((rank, step) for rank, step, _ in parsed(" ".join(trial.run.deaths)))
        assert sorted((rank, step) for rank, step, _ in trial.run.lost) == wanted
        assert all(seconds >= 0 for _, _, seconds in trial.run.lost)
        assert trial.run.recovery_seconds > 0
        assert [step for step, _, _ in trial.run.steps] == list(range(FIRST + 1, STEPS + 1))


def test_restart_ends_where_nobody_died_and_the_others_in_smaller_worlds(listed: dict[Any, dict[str, Any]]) -> None:
    for (recovery, deaths, _), row in listed.items():
        assert (row["outcome"] == "identical") == (recovery == "restart")
        assert row["world_size_end"] == (3 if recovery == "restart" else 3 - deaths)
        assert row["accuracy_loss"] == row["metric_golden"] - row["metric_final"]
        if recovery == "restart":
            assert (row["accuracy_loss"], row["state_distance"]) == (0, 0)
        elif recovery == "rollback":
            assert row["state_distance"] < 1e-5  # the same sums, of other parts


def test_steps_done_again_are_those_since_the_last_checkpoint(listed: dict[Any, dict[str, Any]]) -> None:
    for trial in range(TRIALS):
        ((_, step, bucket),) = parsed(listed["restart", 1, trial]["kills"])
        saved = max(FIRST, (step - 1) // EVERY * EVERY)
        inside = int(bucket is not None)
        assert listed["restart", 1, trial]["steps_again"] == step - 1 - saved + inside
        assert listed["rollback", 1, trial]["steps_again"] == inside
        assert listed["lossy", 1, trial]["steps_again"] == 0


def test_overhead_is_the_time_over_the_median_of_clean_runs(
    results: Results, listed: dict[Any, dict[str, Any]]
) -> None:
    clean = sorted(run.seconds for run in (*results.controls, *results.nulls))
    assert len(clean) == 3
    usual = clean[1]
    for row in listed.values():
        assert row["overhead_seconds"] == pytest.approx(row["seconds"] - usual)
        assert row["overhead_fraction"] == pytest.approx(row["seconds"] / usual - 1)


@pytest.mark.slow
def test_under_mpi_a_campaign_comes_to_what_it_does_under_gloo(tmp_path: Path) -> None:
    """To the bit: sums are in the order of ranks there too, and layouts meet the same deaths."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    axes = {"parallel": ["ddp:2", "mpi:2"], "recovery": "lossy"}
    results = finished(campaign_of(tmp_path, axes, trials=1, null_trials=0))
    told = ("kills", "outcome", "state_digest", "world_size_end", "steps_again", "metric_final")
    here, there = ({name: row[name] for name in told} for row in rows(results))
    assert here == there
    assert here["world_size_end"] == 1


def test_the_golden_run_is_that_of_plain_data_parallel_training(results: Results) -> None:
    from flipper.training.layouts import Parallel
    from flipper.training.run import train
    from flipper.training.spec import TrainSpec

    plain = train(TrainSpec("digits-mlp", Parallel.parse("ddp:3"), seed=1, epochs=2))
    (golden,) = results.goldens.values()
    assert golden.state_digest == plain.state_digest
    assert golden.last_step == STEPS
    assert {run.first_step for run in results.controls} == {FIRST}


def test_a_trial_is_what_kill_and_recovery_make_by_hand(results: Results, listed: dict[Any, dict[str, Any]]) -> None:
    from flipper.failstop.kills import Kill
    from flipper.failstop.run import train_through
    from flipper.failstop.spec import FailstopSpec
    from flipper.training.layouts import Parallel
    from flipper.training.spec import TrainSpec

    row = listed["lossy", 2, 1]
    golden = results.campaign.folder.golden(row["fingerprint"], "ddp:3", row["training_seed"])
    train = TrainSpec("digits-mlp", Parallel.parse("ddp:3"), epochs=2, resume=next(golden.glob("clean.*")))
    kills = tuple(Kill(rank, step, bucket) for rank, step, bucket in parsed(row["kills"]))
    by_hand = train_through(FailstopSpec(train, kills, "lossy"))
    assert by_hand.state_digest == row["state_digest"]
    assert (by_hand.accuracy, by_hand.world_size) == (row["metric_final"], 1)


def test_a_trial_can_be_run_again_by_itself(results: Results, listed: dict[Any, dict[str, Any]]) -> None:
    from flipper.campaigns.again import run_again

    row = listed["rollback", 1, 1]
    for _ in range(2):  # what is kept is written anew
        again = run_again(open_campaign(results.campaign.folder.path), row["cell"], 1, keep=True)
    assert again["as_stored"] is True
    assert again["kills"] == row["kills"].split(" ")
    assert (again["world_size"], again["steps_again"]) == (2, row["steps_again"])
    events = [json.loads(line) for line in Path(again["kept"], "metrics.jsonl").read_text().splitlines()]
    assert [event["rank"] for event in events if event["event"] == "rank-lost"] == [again["lost"][0][0]]
    assert events[-1]["state_digest"] == again["state_digest"] == row["state_digest"]


def test_the_summary_compares_recoveries_pair_by_pair(results: Results, listed: dict[Any, dict[str, Any]]) -> None:
    from flipper.campaigns.summary import summary

    numbers = summary(results)
    assert numbers["exposure"] == []
    assert [(each["setting"]["deaths"], each["recovery"]) for each in numbers["strategies"]] == [
        (deaths, recovery) for deaths in (1, 2) for recovery in ("restart", "rollback", "lossy")
    ]
    lossy = next(each for each in numbers["strategies"] if each["recovery"] == "lossy")
    losses = [listed["lossy", 1, trial]["accuracy_loss"] for trial in range(TRIALS)]
    assert lossy["accuracy_loss"]["mean"] == pytest.approx(sum(losses) / TRIALS)
    assert (lossy["trials"], lossy["ranks_lost"], lossy["world_size_end"]["mean"]) == (TRIALS, TRIALS, 2)
    compared = {(e["setting"]["deaths"], e["a"], e["b"], e["measure"]): e for e in numbers["differences"]}
    assert len(compared) == 2 * 3 * 2
    apart = compared[1, "restart", "lossy", "accuracy_loss"]
    assert apart["difference"] == pytest.approx(-sum(losses) / TRIALS)
    assert (apart["pairs"], apart["draws"]) == (TRIALS, TRIALS)
    assert all(each["p"] <= each["p_holm"] <= 1 for each in compared.values())
    harm = [(each["axis"], each["a"], each["b"]) for each in numbers["comparisons"]]
    assert harm == [("recovery", "restart", "rollback"), ("recovery", "restart", "lossy"),
                    ("recovery", "rollback", "lossy")]  # fmt: skip


def test_too_few_survivors_are_a_crash_and_a_restart_has_none_too_few(tmp_path: Path) -> None:
    axes = {"parallel": "ddp:2", "recovery": ["restart", "lossy"], "min_ranks": 2, "step": 30, "rank": 1, "bucket": 0}
    found = finished(campaign_of(tmp_path, axes, trials=2, null_trials=0, tolerance=0.01))
    by_recovery = {(trial.cell.axes["recovery"], trial.run.trial): trial for trial in found.trials}
    assert {by_recovery["restart", trial].judgement.outcome for trial in range(2)} == {"identical"}
    for trial in range(2):
        lost = by_recovery["lossy", trial]
        assert (lost.judgement.outcome, lost.judgement.group) == ("crash", "due")
        assert "1 of 2 ranks are left: fewer than --min-ranks 2" in (lost.run.error or "")
    row = next(row for row in rows(found) if row["outcome"] == "crash")
    assert (row["accuracy_loss"], row["overhead_seconds"], row["world_size_end"]) == (None, None, None)


def test_failures_are_drawn_over_the_run_also_where_each_rank_holds_a_part(tmp_path: Path) -> None:
    """A pipeline can only restart; of rare failures some trials have none, and are the golden run."""
    axes = {"parallel": "pipeline:2", "recovery": "restart:4", "mtbf": [3, 1e9]}
    found = finished(campaign_of(tmp_path, axes, trials=1, null_trials=0, tolerance=0.01))
    often, rarely = found.trials
    assert often.run.deaths != []
    assert rarely.run.deaths == rarely.run.lost == []
    assert {trial.judgement.outcome for trial in found.trials} == {"identical"}
    assert (often.run.world_size, rarely.run.world_size) == (2, None)
    assert [row["world_size_end"] for row in rows(found)] == [2, 2]


def test_a_step_that_trials_do_not_have_is_told_before_the_first_one(tmp_path: Path) -> None:
    axes = {"parallel": "ddp:2", "recovery": "lossy", "step": [30, 45]}
    with pytest.raises(UsageError, match=r"step=45\): step = 45: trials have the steps 23 to 44"):
        finished(campaign_of(tmp_path, axes, null_trials=0, tolerance=0.01))


def test_a_rank_that_was_not_to_die_is_no_result_of_a_trial() -> None:
    from flipper.campaigns.death_runs import refuse_others
    from flipper.campaigns.record import RunRecord
    from flipper.failstop.kills import Kill

    kills = (Kill(1, 30, 0), Kill(2, 35, 0))
    refuse_others(RunRecord("trial", "ddp:4", 1, lost=[(2, 35, 0.1), (1, 30, 0.1)]), kills)
    refuse_others(RunRecord("trial", "ddp:4", 1, lost=[(1, 30, 0.1)]), kills)  # the run failed before the second
    with pytest.raises(EndedError, match="rank 0 was lost, which was not to die"):
        refuse_others(RunRecord("trial", "ddp:4", 1, lost=[(1, 30, 0.1), (0, 31, 0.1)]), kills)
