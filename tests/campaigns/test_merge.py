"""Shards run side by side in one folder, and what they and other folders hold is joined: once, whole, or not at all."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from campaign_processes import SPEC, begin, campaign, stored

from flipper.campaigns.engines import open_engine
from flipper.campaigns.folder import Campaign, settle
from flipper.campaigns.merge import merge
from flipper.campaigns.record import RunRecord
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import spec_of
from flipper.campaigns.status import status
from flipper.campaigns.store import Store
from flipper.errors import OutputError, UsageError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a campaign that one process ran."""
    folder = tmp_path_factory.mktemp("whole")
    assert campaign(folder, "run", "spec.toml", "-q")[0] == 0
    return folder / "small"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same campaign, run by three shards at the same time."""
    folder = tmp_path_factory.mktemp("shards")
    processes = [begin(folder, "run", "spec.toml", "--shard", f"{number}/3") for number in (1, 2, 3)]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert json.loads(out)["trials"] == 8
        assert err.splitlines()[-1].endswith("`flipper campaign merge small` joins those of all shards")
    return folder / "small"


def test_each_shard_has_its_own_trials_and_null_trials(shards: Path) -> None:
    for number in (1, 2, 3):
        runs = stored(shards / f"results-{number}-of-3.sqlite")
        mine = [key for key in runs if key[0] in ("trial", "null")]
        assert {trial % 3 for _, _, trial, *_ in mine} == {number - 1}
        assert len(mine) == 4 * 2 + 2 * 2


def test_golden_runs_are_shared_and_whole(shards: Path) -> None:
    (machine,) = (shards / "golden").iterdir()
    assert sorted(path.name for path in machine.iterdir()) == [
        "ddp:2-seed1", "ddp:2-seed2", "single-seed1", "single-seed2"
    ]  # fmt: skip
    for home in machine.iterdir():
        assert sorted(path.name for path in home.iterdir()) == ["clean.safetensors", "golden.json", "last.safetensors"]


def test_joined_shards_are_the_campaign_that_one_process_runs(shards: Path, whole: Path) -> None:
    code, out, err = campaign(shards.parent, "merge", "small", "--format", "json")
    assert (code, err) == (0, "joined 3 databases into small/results.sqlite\n")
    told = json.loads(out)
    assert (told["trials"], told["missing"]) == (24, 0)
    assert [(each["trials"], each["null_trials"]) for each in told["joined"]] == [(8, 4)] * 3
    assert stored(shards / "results.sqlite") == stored(whole / "results.sqlite")
    assert sum(each["new_runs"] for each in told["joined"]) == len(stored(whole / "results.sqlite"))


def dump(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def test_joining_again_changes_nothing_and_status_tells_the_joined_campaign(shards: Path, whole: Path) -> None:
    assert campaign(shards.parent, "merge", "small", "-q")[0] == 0
    before = dump(shards / "results.sqlite")
    code, out, _ = campaign(shards.parent, "merge", "spec.toml", "-q")
    assert code == 0
    assert [each["new_runs"] for each in json.loads(out)["joined"]] == [0, 0, 0]
    assert dump(shards / "results.sqlite") == before
    mine, other = (json.loads(campaign(folder, "status", "small")[1]) for folder in (shards.parent, whole.parent))
    assert {**mine, "seconds": 0} == {**other, "seconds": 0}


def test_a_joined_campaign_goes_on_by_itself_and_in_its_shards(shards: Path) -> None:
    campaign(shards.parent, "merge", "small", "-q")
    spec = shards.parent / "spec.toml"
    spec.write_text(SPEC.replace("trials = 6", "trials = 7", 1))
    assert campaign(shards.parent, "run", "spec.toml", "--shard", "1/3", "-q")[0] == 0
    code, out, _ = campaign(shards.parent, "merge", "small", "-q")
    told = json.loads(out)
    assert (code, told["trials"], told["missing"]) == (0, 28, 0)  # trial 6 belongs to the first shard
    assert [each["new_runs"] for each in told["joined"]] == [4, 0, 0]
    code, out, _ = campaign(shards.parent, "run", "spec.toml", "-q")
    assert (code, json.loads(out)["trials"]) == (0, 28)


def test_a_census_is_shared_out_and_a_shard_may_have_nothing_to_do(tmp_path: Path) -> None:
    axes = {"parallel": "single", "layer": "fc3.bias", "bits": "sign"}  # of which there are ten
    found = made(tmp_path, axes=axes, trials="all", tolerance=0.05)
    with open_engine("local") as engine:
        done = [run_campaign(found, engine, shard=(number, 12)).outcomes.total() for number in (10, 11, 12)]
        assert done == [1, 0, 0]
        assert [run_campaign(found, engine, shard=(number, 2)).outcomes.total() for number in (1, 2)] == [5, 5]
    assert sum(joined.new for joined in merge(found) if joined.held["trial"] == 5) == 10 - 1 + 2  # golden, control
    places = {str(run["trial"]) for key, run in stored(found.folder.results()).items() if key[0] == "trial"}
    assert len(places) == 10


def test_a_shard_of_a_campaign_with_a_margin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC.replace("trials = 6", "margin = 0.1", 1))
    code, out, err = campaign(tmp_path, "run", "spec.toml", "--shard", "1/2")
    assert (code, out) == (2, "")
    assert err.startswith("flipper: error: campaign.margin stops a cell by its first trials in order")
    assert err.count("\n") == 1


def made(folder: Path, **values: Any) -> Campaign:
    axes = values.pop("axes", {"parallel": ["single", "ddp:2"], "count": [1, 10]})
    usual = {"name": "made", "recipe": "digits-mlp", "inject_epoch": 1, "epochs": 2, "trials": 4}
    return settle(spec_of({"campaign": {**usual, **values}, "axes": axes}), folder)


def trial(cell: int, number: int, parallel: str = "single", **values: Any) -> RunRecord:
    usual: dict[str, Any] = {"fingerprint": "f", "plan": f"plan{number}", "loss": 0.5, "metric": 0.9}
    return RunRecord("trial", parallel, 1, cell=cell, trial=number, **{**usual, **values})


def put(campaign: Campaign, *records: RunRecord, shard: tuple[int, int] | None = None, seconds: float = 1.0) -> None:
    with Store(campaign.folder.results(shard), write=True) as store:
        store.join(records, {"seconds": seconds})


def test_cells_of_another_folder_are_found_by_their_axes(tmp_path: Path) -> None:
    mine = made(tmp_path / "mine")
    made(tmp_path / "other", axes={"parallel": "ddp:2", "count": [10]})
    other = made(tmp_path / "other")  # which numbers the cell that it began with 0
    assert [(c.number, c.parallel, c.axes["count"]) for c in mine.cells] != [
        (c.number, c.parallel, c.axes["count"]) for c in other.cells
    ]
    (theirs,) = (c.number for c in other.cells if (c.parallel, c.axes["count"]) == ("ddp:2", 10))
    (ours,) = (c.number for c in mine.cells if (c.parallel, c.axes["count"]) == ("ddp:2", 10))
    put(other, trial(theirs, 0, "ddp:2"), trial(theirs, 1, "ddp:2", reused=(theirs, 0)), seconds=5.0)
    put(mine, trial(ours, 2, "ddp:2"), seconds=3.0)
    (joined,) = merge(mine, [other.folder.path])
    assert (joined.new, joined.held) == (2, {"trial": 2})
    found = stored(mine.folder.results())
    assert {(cell, number) for _, cell, number, *_ in found} == {(ours, 0), (ours, 1), (ours, 2)}
    assert found["trial", ours, 1, "ddp:2", "1", "f"]["reused"] == [ours, 0]
    for _ in range(2):
        with Store(mine.folder.results()) as store:
            assert store.facts()["seconds"] == 8.0
        merge(mine, [other.folder.path, other.folder.path, mine.folder.path])


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"seed": 7}, r"seed = 7, .* has 0: these are different campaigns"), ({"epochs": 3}, "epochs = 3, .* has 2")],
)
def test_another_campaign_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    mine, other = made(tmp_path / "mine"), made(tmp_path / "other", **changed)
    put(other, trial(0, 0))
    with pytest.raises(UsageError, match=message):
        merge(mine, [other.folder.path])
    assert not mine.folder.results().exists()


def test_other_thresholds_and_numbers_of_trials_may_be_joined(tmp_path: Path) -> None:
    mine, other = made(tmp_path / "mine"), made(tmp_path / "other", trials=9, tolerance=0.1)
    put(other, trial(0, 8))
    assert merge(mine, [other.folder.path])[0].new == 1


def test_results_of_a_cell_that_the_campaign_lacks_are_refused(tmp_path: Path) -> None:
    mine = made(tmp_path / "mine", axes={"parallel": "single", "count": 1})
    other = made(tmp_path / "other")
    put(other, trial(0, 0))
    assert merge(mine, [other.folder.path])[0].new == 1
    put(other, trial(1, 0))
    with pytest.raises(UsageError, match="results of its cell 1, which the campaign doesn't have"):
        merge(mine, [other.folder.path])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": float("nan")}, r"trial 1 of cell 0 has loss = 0\.5 in .*results-1-of-2.* and NaN in .*2-of-2"),
        ({"state_digest": "b"}, 'state_digest = "" in .*, and "b" in'),
        ({"plan": "p"}, 'plan = "plan1" in .*, and "p" in'),
        ({"ended": "crash"}, 'failure = "" in .*, and "crash" in'),
    ],
)
def test_contradicting_results_of_one_trial_are_refused_and_nothing_is_changed(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    mine = made(tmp_path)
    put(mine, trial(0, 0), trial(0, 1), shard=(1, 2))
    put(mine, trial(0, 1, **changed), trial(0, 2), shard=(2, 2))
    with pytest.raises(UsageError, match=message):
        merge(mine)
    assert stored(mine.folder.results()) == {}


def test_equal_results_of_one_trial_are_taken_once(tmp_path: Path) -> None:
    mine = made(tmp_path)
    nan = float("nan")
    put(mine, trial(0, 0, loss=nan, seconds=1.0, ended="non-finite"), shard=(1, 2))
    put(mine, trial(0, 0, loss=nan, seconds=2.0, ended="non-finite", reused=(1, 0)), shard=(2, 2))
    assert [each.new for each in merge(mine)] == [1, 0]


def test_another_kind_of_machine_adds_its_golden_run_and_no_second_result_of_a_trial(tmp_path: Path) -> None:
    mine = made(tmp_path)
    golden = RunRecord("golden", "single", 1, fingerprint="f", state_digest="a")
    null = RunRecord("null", "single", 1, trial=3, fingerprint="f", metric=0.5)
    elsewhere = {"fingerprint": "g", "state_digest": "b"}
    put(mine, golden, null, trial(0, 0), shard=(1, 2))
    others = [RunRecord("golden", "single", 1, **elsewhere), RunRecord("null", "single", 1, trial=3, **elsewhere)]  # type: ignore[arg-type]
    put(mine, *others, trial(0, 0, **elsewhere), trial(0, 1, **elsewhere), shard=(2, 2))
    assert [each.new for each in merge(mine)] == [3, 2]
    assert sorted((kind, number, machine) for kind, _, number, *_, machine in stored(mine.folder.results())) == [
        ("golden", 0, "f"), ("golden", 0, "g"), ("null", 3, "f"), ("trial", 0, "f"), ("trial", 1, "g")
    ]  # fmt: skip


def test_golden_runs_that_differ_on_one_kind_of_machine_are_refused(tmp_path: Path) -> None:
    mine = made(tmp_path)
    for number, digest in ((1, "a"), (2, "b")):
        put(mine, RunRecord("golden", "single", 1, fingerprint="f", state_digest=digest), shard=(number, 2))
    with pytest.raises(UsageError, match='the golden run of single, training seed 1, has state_digest = "a" in'):
        merge(mine)


def test_a_shard_that_was_killed_at_once_has_no_trials(tmp_path: Path) -> None:
    mine = made(tmp_path)
    golden = RunRecord("golden", "single", 1, fingerprint="f", metric=0.9)
    put(mine, golden, trial(0, 0), shard=(1, 2))
    mine.folder.results((2, 2)).touch()
    assert status(tmp_path)["trials"] == 1
    assert [(each.new, each.held["trial"]) for each in merge(mine)] == [(2, 1), (0, 0)]


def test_what_has_nothing_to_join_is_told(tmp_path: Path) -> None:
    mine, empty = made(tmp_path / "mine"), made(tmp_path / "empty")
    with pytest.raises(UsageError, match="no results of shards, and no other folder was given"):
        merge(mine)
    with pytest.raises(UsageError, match="empty has no results yet"):
        merge(mine, [empty.folder.path])
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"it has no campaign\.json"):
        merge(mine, [tmp_path / "none"])


def test_a_campaign_that_runs_is_not_joined_into(tmp_path: Path) -> None:
    mine = made(tmp_path)
    put(mine, trial(0, 0), shard=(1, 2))
    with Store(mine.folder.results(), write=True), pytest.raises(OutputError, match="writes to this campaign"):
        merge(mine)
