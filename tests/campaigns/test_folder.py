"""What a campaign's folder says it is: read again as it was written, or told to be damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from campaign_processes import number_of, stored

from flipper.campaigns.cells import cells_of
from flipper.campaigns.engines import open_engine
from flipper.campaigns.folder import Campaign, Folder, campaign_of, open_campaign, settle
from flipper.campaigns.kept import reading
from flipper.campaigns.owners import Owner
from flipper.campaigns.record import RunRecord
from flipper.campaigns.run import run_campaign
from flipper.campaigns.spec import read_spec
from flipper.campaigns.status import status
from flipper.campaigns.store import Store
from flipper.errors import OutputError, RecipeError, UsageError

SPEC = """
[campaign]
name = "kept"
recipe = "digits-mlp"
inject_epoch = 1
epochs = 2
[axes]
parallel = ["ddp:2", "pipeline:2"]
count = [1, 10]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return settle(read_spec(tmp_path / "spec.toml"), tmp_path / "kept").folder.path


def test_a_campaign_of_a_file_is_in_the_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.toml").write_text(SPEC)
    campaign = campaign_of(Path("spec.toml"), changes=["axes.count=3", "campaign.trials=4"])
    assert campaign.folder.path == Path("kept")
    assert [(cell.parallel, cell.axes["count"], cell.trials) for cell in campaign.cells] == [
        ("ddp:2", 3, 4), ("pipeline:2", 3, 4),
    ]  # fmt: skip
    assert not campaign.folder.path.exists()
    assert settle(campaign.spec, campaign.folder.path) == open_campaign(Path("kept")) == campaign


def test_a_folder_is_read_as_it_was_written_and_new_cells_are_counted_on(folder: Path) -> None:
    before = open_campaign(folder)
    assert before.cells == cells_of(before.spec)
    more = campaign_of(folder.parent / "spec.toml", folder, ["axes.count=5,1,10"])
    numbers = {(cell.parallel, cell.axes["count"]): cell.number for cell in more.cells}
    assert {key: numbers[key] for key in numbers if key[1] != 5} == {
        (cell.parallel, cell.axes["count"]): cell.number for cell in before.cells
    }
    assert sorted(numbers.values()) == list(range(6))


CHANGED = ["campaign.seed=7", "axes.count=3"]


@pytest.mark.parametrize("left", [[], ["logs/golden.log"], ["golden/machine/.ddp:2-seed1-unfinished/clean"]])
def test_a_campaign_that_nothing_was_made_for_gives_way_to_another(folder: Path, left: list[str]) -> None:
    Store(folder / "results.sqlite", write=True).close()
    for name in left:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    spec = read_spec(folder.parent / "spec.toml", CHANGED)
    assert settle(spec, folder) == open_campaign(folder) == Campaign(Folder(folder), spec, cells_of(spec))


def test_a_campaign_with_a_golden_run_gives_way_to_no_other(folder: Path) -> None:
    (folder / "golden" / "machine" / "ddp:2-seed1").mkdir(parents=True)
    with pytest.raises(UsageError, match="kept has results with seed = 0, the spec now says 7: "):
        campaign_of(folder.parent / "spec.toml", folder, CHANGED)


def test_a_campaign_whose_first_run_is_being_made_gives_way_to_no_other(folder: Path) -> None:
    (folder / "results-1-of-2.sqlite").touch()
    owner = Owner("elsewhere", 1, "1")
    (folder / "results-1-of-2.sqlite.lock").write_text(owner.text())
    with pytest.raises(OutputError, match=r"process 1 on elsewhere runs the campaign in .*kept with seed = 0, the"):
        campaign_of(folder.parent / "spec.toml", folder, CHANGED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("campaign.trials=3", r"kept has results with trials = 4 of cell ddp:2 count=1, the spec now says 3: .* give "),
        ("campaign.null_trials=2", r"kept has results with null_trials = 3, the spec now says 2: only trials and axis"),
    ],
)
def test_trials_are_not_taken_away(folder: Path, change: str, message: str) -> None:
    """Of two shards, the second of which has the trial with the highest number."""
    for number, kind, cell in ((3, "trial", 0), (2, "null", -1)):
        with Store(folder / f"results-{number % 2 + 1}-of-2.sqlite", write=True) as store:
            store.add(RunRecord(kind, "ddp:2", 1, cell=cell, trial=number, fingerprint="f"))
    usual = ["campaign.trials=4", "campaign.null_trials=3"]
    assert campaign_of(folder.parent / "spec.toml", folder, usual).spec.trials == 4
    with pytest.raises(UsageError, match=message):
        campaign_of(folder.parent / "spec.toml", folder, [*usual, change])


@pytest.mark.parametrize("recipe", ["missing.py:MINE", "digits.py:OTHER"])
def test_a_first_run_that_makes_nothing_leaves_nothing(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "digits.py").write_text("from flipper.training.recipes import digits_mlp as MINE\n")
    changes = [f"campaign.recipe={tmp_path / recipe}", "axes.parallel=single"]
    asked = campaign_of(tmp_path / "spec.toml", tmp_path / "kept", changes)
    with open_engine("local") as engine, pytest.raises(UsageError):
        run_campaign(asked, engine)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["digits.py", "spec.toml"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"spec"', '"specs"'), ('"axes"', '"axis"'), ('"cell": 0', '"cell": Infinity'), ('"cell": 0', '"cell": "a"'),
        ('"parallel"', '"paralel"'), ('"name"', '"names"'), ('"ddp:2"', "null"), ('"slices": [', '"slices": [7, '),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_told(folder: Path, old: str, new: str) -> None:
    kept = (folder / "campaign.json").read_text()
    damaged = kept.replace(old, new)
    assert damaged != kept
    (folder / "campaign.json").write_text(damaged)
    with pytest.raises(UsageError) as error:
        open_campaign(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"spec": []}', "[" * 100_000])
def test_what_is_no_campaign_is_told(folder: Path, content: str) -> None:
    (folder / "campaign.json").write_text(content)
    with pytest.raises(UsageError, match=r"campaign\.json is damaged: "):
        open_campaign(folder)


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ({}, {"slices": []}, "slices must be tables, each begun by [[slices]]"),
        ({}, {"slices": [{"axes": {"parallel": []}, "trials": None}]}, "slices 1: parallel has no value"),
        ({}, {"slices": None}, "slices must be a list of tables, each with its axes and trials, not None"),
        ({}, {"trials": "six"}, "campaign.trials must be a positive whole number or \"all\", not 'six'"),
        ({}, {"tolerance": "auto"}, "tolerance is 'auto', which `campaign run` does not write there"),
        ({}, {"census": "yes"}, "census is 'yes', which `campaign run` does not write there"),
        ({}, {"here": 7}, "here is 7, which `campaign run` does not write there"),
        ({}, {"name": "a/b"}, "campaign.name is 'a/b'; it names a folder"),
        ({}, {"margin": 2}, "campaign.margin must be a number between 0 and 0.5, not 2"),
        ({}, {"training_seeds": []}, "campaign.training_seeds must be whole numbers"),
        ({}, {"recipe": None}, "give campaign.recipe, or a table [commands]"),
        ({"spec": {}}, {}, "slices must be a list of tables, each with its axes and trials, not None"),
        ({"spec": None}, {}, "it holds no spec"),
        ({"cells": None}, {}, "it holds no cells"),
        ({"cells": [{"cell": 0, "axes": {}}]}, {}, "a cell must be a table of its number, axes and trials, not {'cell"),
        ({"cells": [{"cell": 0, "axes": {}, "trials": 1}] * 2}, {}, "two cells have the number 0"),
    ],
)
def test_a_campaign_that_no_file_asks_for_is_told_by_its_key(
    folder: Path, part: dict[str, Any], value: dict[str, Any], told: str
) -> None:
    document = json.loads((folder / "campaign.json").read_text())
    document["spec"] |= value
    (folder / "campaign.json").write_text(json.dumps(document | part))
    for read in (open_campaign, status):
        with pytest.raises(UsageError) as error:
            read(folder)
        assert str(error.value).startswith(f"{folder / 'campaign.json'} is damaged: {told}")


def test_a_recipe_is_told_what_it_can_be_told(folder: Path) -> None:
    written = (folder / "campaign.json").read_text()
    (folder / "campaign.json").write_text(written.replace('"device": "cpu"', '"device": "tpu"'))
    with pytest.raises(UsageError, match=r"campaign\.json is damaged: campaign\.device: there is no 'tpu', but auto"):
        open_campaign(folder)


def test_a_folder_whose_campaign_cannot_be_read_is_not_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    for read in (open_campaign, status):
        with pytest.raises(UsageError) as error:
            read(folder)
        assert str(error.value) == f"{folder / 'campaign.json'} can't be read: Permission denied"


def test_a_golden_run_that_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error, reading(tmp_path / "golden.json"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "clean.pt"))
    assert str(error.value) == f"{tmp_path / 'clean.pt'} can't be read: Permission denied"


def run(folder: Path, trials: int) -> None:
    changes = [f"campaign.trials={trials}", "campaign.null_trials=2", "axes.parallel=single,ddp:2", "axes.count=1"]
    with open_engine("local") as engine:
        run_campaign(campaign_of(folder.parent / "spec.toml", folder, changes), engine)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    """A folder with one trial a cell, and what all runs are when there are two."""
    home = tmp_path_factory.mktemp("ran")
    (home / "spec.toml").write_text(SPEC)
    run(home / "kept", 1)
    shutil.copytree(home / "kept", home / "whole")
    run(home / "whole", 2)
    return home / "kept", stored(home / "whole" / "results.sqlite")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0x40
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def another(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("clean.safetensors", Path.unlink), ("clean.safetensors", flipped), ("clean.safetensors", cut_off),
        ("last.safetensors", flipped), ("golden.json", Path.unlink), ("golden.json", cut_off), ("golden.json", another),
    ],
)  # fmt: skip
def test_a_golden_run_that_is_not_as_it_was_left_is_told_and_made_again_once_it_is_removed(
    ran: tuple[Path, dict[Any, Any]], tmp_path: Path, name: str, damage: Any
) -> None:
    before, whole = ran
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "kept"
    shutil.copytree(before, folder)
    home = next(folder.glob("golden/*/ddp:2-seed1"))
    damage(home / name)
    with pytest.raises(UsageError) as error:
        run(folder, 2)
    assert str(error.value).startswith(f"the golden run in {home} is damaged: ")
    shutil.rmtree(home)
    run(folder, 2)
    assert stored(folder / "results.sqlite") == whole


OWN = """
from dataclasses import replace
from flipper.training.recipes import get
import beside
OWN = replace(get("digits-mlp"), name="own", batch_size=beside.SIZE)
"""


def run_own(home: Path, trials: int) -> None:
    changes = [f"campaign.trials={trials}", f"campaign.recipe={home}/own.py:OWN", "axes.parallel=single"]
    with open_engine("local") as engine:
        run_campaign(campaign_of(home / "spec.toml", home / "kept", changes), engine)


def test_a_users_recipe_may_neither_change_nor_break_between_two_calls(tmp_path: Path) -> None:
    """What lies beside it may be imported, and is not looked at, but no trial is blamed for it."""
    (tmp_path / "spec.toml").write_text(SPEC)
    (recipe := tmp_path / "own.py").write_text(OWN)
    (beside := tmp_path / "beside.py").write_text("SIZE = 32")
    run_own(tmp_path, 1)
    recipe.write_text(OWN.replace("beside.SIZE", "16"))
    with pytest.raises(UsageError, match=r"own\.py has changed since its golden run; choose another --out"):
        run_own(tmp_path, 2)
    recipe.write_text("def own(:")
    with pytest.raises(UsageError, match=r"own\.py has changed since its golden run"):
        run_own(tmp_path, 2)
    recipe.write_text(OWN)
    beside.write_text("def size(:")
    with pytest.raises(RecipeError, match=r"own\.py can't be loaded: SyntaxError"):
        run_own(tmp_path, 2)
    beside.write_text("SIZE = 32")
    run_own(tmp_path, 2)
    assert number_of(tmp_path / "kept" / "results.sqlite") == 4
