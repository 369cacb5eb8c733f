"""The first lines of the page: what they claim for which numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up_campaign
import pytest
from made_up_campaign import made_up

from flipper.report.answer import answer, progress
from flipper.report.material import Material, material_of


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return material_of(made_up(tmp_path_factory.mktemp("made-up")))


def told(material: Material, **numbers: Any) -> str:
    """All that is said where the primary numbers are these."""
    main = {**material.numbers["primary"], **numbers}
    said = answer(replace(material, numbers={**material.numbers, "primary": main}))
    return "\n".join(map(str, (said.verdict, *said.grounds)))


MORE = {"difference": 0.2, "low": 0.1, "high": 0.3, "p": 0.001}
NONE = {"difference": 0.01, "low": -0.02, "high": 0.03, "p": 0.7}


def test_more_harm_under_one_layout(material: Material) -> None:
    said = told(material, **MORE, equivalent=False)
    assert "Harm was more frequent under data-parallel training (ddp:2) than under model-parallel training" in said
    assert "equivalent" not in said.splitlines()[0]
    other = told(material, difference=-0.2, low=-0.3, high=-0.1, p=0.001, equivalent=False)
    assert "more frequent under model-parallel training (pipeline:2) than under data-parallel" in other


def test_a_difference_within_the_margin_is_told_with_the_equivalence(material: Material) -> None:
    said = told(material, difference=0.02, low=0.01, high=0.03, p=0.01, equivalent=True)
    assert "more frequent" in said
    assert "smaller than the margin of ±5 percentage points" in said


def test_no_difference_is_no_equality(material: Material) -> None:
    said = told(material, **NONE, equivalent=False)
    assert "No difference" in said
    assert "one beyond the margin of ±5 percentage points remains possible" in said
    assert "no proof that there is no difference" in said
    assert "equivalent" not in said.splitlines()[0]
    assert "not shown" in said


def test_equivalence_is_claimed_where_it_was_shown(material: Material) -> None:
    said = told(material, **NONE, equivalent=True)
    assert said.splitlines()[0].endswith("are equivalent within the margin of ±5 percentage points.")
    assert "no proof" not in said


@pytest.mark.parametrize("edge", [{"low": -0.001, "p": 0.04}, {"low": 0.001, "p": 0.06}])
def test_test_and_interval_that_disagree_decide_nothing(material: Material, edge: dict[str, float]) -> None:
    said = told(material, **{**MORE, **edge}, equivalent=False)
    assert "at the edge" in said
    assert "more frequent" not in said


def test_the_numbers_are_those_of_the_pairs(material: Material) -> None:
    said = told(material, pairs=40, both=3, only_a=5, only_b=1, neither=31, draws=20, **MORE, equivalent=False)
    for part in (">20.0%<", ">10.0%<", ">+20.0<", ">+10.0<", ">+30.0<", ">0.00100<", "20</data> draws"):
        assert part in said
    assert "were 8 of 40 trials" in said


def test_one_training_seed_speaks_of_one_run(material: Material, tmp_path: Path) -> None:
    one = material_of(made_up(tmp_path, seeds=(3,)))
    said = "".join(map(str, answer(one).grounds))
    assert "one training run (training seed 3)" in said
    assert "by training seed" not in said
    several = "".join(map(str, answer(material).grounds))
    assert "Differences by training seed" in several
    assert "(seed 1)" in several
    assert "(seed 2)" in several


def test_seeds_that_agree_are_not_taken_for_certainty(material: Material) -> None:
    seeds = {"values": {"1": 0.1, "2": 0.1}, "mean": 0.1, "deviation": 0.0, "low": 0.1, "high": 0.1, "one_run": False}
    said = told(material, **MORE, equivalent=False, over_seeds=seeds)
    assert "too few to say how much others would differ" in said
    assert "interval over seeds" not in said


def test_without_both_kinds_of_layout_there_is_no_answer(tmp_path: Path) -> None:
    alone = answer(material_of(made_up(tmp_path / "a", layouts=("ddp:2",))))
    assert "One layout was tested" in alone.verdict
    assert "nothing on how layouts differ" in alone.verdict
    same = answer(material_of(made_up(tmp_path / "b", layouts=("ddp:2", "hooks:2"))))
    assert "no answer to how the two differ" in same.verdict
    assert alone.grounds == same.grounds == []


def test_without_pairs_nothing_is_said(tmp_path: Path) -> None:
    assert "Nothing can be said yet" in answer(material_of(made_up(tmp_path, done=0))).verdict


def test_an_unfinished_campaign_is_told(material: Material, tmp_path: Path) -> None:
    assert "not finished" not in progress(material)
    started = progress(material_of(made_up(tmp_path, trials=6, done=4)))
    assert ">48</data> trials in" in started
    assert ">72</data> planned: <strong>the campaign is not finished" in started


def test_what_was_not_struck_is_told_with_the_buffers_of_a_model_that_has_some(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Not struck: buffer, optimizer." in material.numbers["limits"]
    monkeypatch.setattr(made_up_campaign, "RESIDENT", made_up_campaign.RESIDENT | {"buffers": 0})
    without = material_of(made_up(tmp_path))
    assert "Not struck: optimizer." in without.numbers["limits"]
