"""The report of a campaign whose ranks die: recovery against recovery, with known losses and times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chromium_page import Page
from made_up_deaths import CLEAN_SECONDS, EXTRA, LOST, made_up
from scipy import stats

from flipper.campaigns.folder import Campaign
from flipper.report.writing import write_numbers, write_report

TRIALS = 12


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return made_up(tmp_path_factory.mktemp("deaths"), TRIALS)


@pytest.fixture(scope="module")
def numbers(campaign: Campaign) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write_numbers(campaign, None)[0])
    return found


@pytest.fixture(scope="module")
def text(campaign: Campaign) -> str:
    (page,) = write_report(campaign)
    return page.read_text("utf-8")


def shown(html: str) -> str:
    """The words of a page, without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_each_recovery_has_its_means(numbers: dict[str, Any]) -> None:
    found = {each["recovery"]: each for each in numbers["strategies"]}
    assert list(found) == list(LOST)
    for recovery, each in found.items():
        assert (each["trials"], each["ranks_lost"], each["with_deaths"]) == (24, 24, 24)
        seconds = [EXTRA[recovery] + 0.01 * number for number in range(TRIALS)] * 2
        low, high = stats.t.interval(0.95, 23, loc=sum(seconds) / 24, scale=stats.sem(seconds))
        over = each["overhead_seconds"]
        assert (over["mean"], over["low"], over["high"]) == pytest.approx((sum(seconds) / 24, low, high))
        assert each["overhead_fraction"]["mean"] == pytest.approx(sum(seconds) / 24 / CLEAN_SECONDS)
        assert each["accuracy_loss"]["mean"] == pytest.approx(LOST[recovery], abs=1e-12)
    assert {recovery: each["harmful"] for recovery, each in found.items()} == {"restart": 0, "rollback": 0, "lossy": 24}
    assert found["restart"]["identical"] == 24


def test_recoveries_are_compared_over_the_same_deaths(numbers: dict[str, Any]) -> None:
    found = {(each["a"], each["b"], each["measure"]): each for each in numbers["differences"]}
    assert len(found) == 6
    apart = found["rollback", "lossy", "accuracy_loss"]
    assert (apart["pairs"], apart["draws"]) == (24, 24)
    assert apart["difference"] == pytest.approx(-0.02)
    assert apart["p"] == pytest.approx(1e-5)  # 24 differences of one sign: the least that the sample can show
    assert found["restart", "rollback", "accuracy_loss"]["p"] == 1
    assert found["restart", "lossy", "overhead_fraction"]["difference"] == pytest.approx(2.8 / 4)
    harm = {(each["a"], each["b"]): each for each in numbers["comparisons"]}
    assert harm["restart", "lossy"]["difference"] == -1
    assert harm["restart", "lossy"]["p"] == pytest.approx(2 * 0.5**24)  # McNemar's


def test_the_first_lines_say_how_recoveries_compare(text: str) -> None:
    words = shown(text)
    assert "How do the recoveries compare?" in words
    assert "Harmed: restart 0 of 24 , rollback 0 of 24 , lossy 24 of 24 ." in words
    assert "Of accuracy, lossy lost more than restart; lossy lost more than rollback." in words
    assert "restart: of 24 trials 0 harmful, 24 equal to their golden run bit for bit" in words
    assert "depend on what else it did meanwhile" in words


def test_the_page_has_what_deaths_have_and_leaves_out_what_bits_have(text: str) -> None:
    parts = set(re.findall(r'<h[23] id="([^"]+)"', text))
    assert {"strategies", "outcomes", "curves", "paired", "trials", "checks"} <= parts
    assert not {"bits", "exposure"} & parts
    assert 'id="figure-trade-off"' in text
    assert "rank:0@step:5:bucket:1" in text
    assert re.search(r'href="#(bits|exposure)"', text) is None


def test_the_trade_off_is_drawn_with_both_intervals_and_said_in_words(campaign: Campaign, tmp_path: Path) -> None:
    written = write_report(campaign, tmp_path / "page.html", tmp_path / "figures")
    assert {path.name for path in written} >= {"trade-off.pdf", "trade-off.svg"}
    svg = (tmp_path / "page.html").read_text("utf-8").split('id="figure-trade-off"')[1].split("</svg>")[0]
    said = re.search(r'aria-label="(accuracy lost against overhead[^"]+)"', svg)
    assert said is not None
    assert "lossy under ddp:4: +2.00 points lost, 6.38% overhead" in said[1]
    drawn = (tmp_path / "figures" / "trade-off.svg").read_text("utf-8")
    assert drawn.count('id="LineCollection_') == 6  # an interval on either axis for each of three recoveries


def test_settings_have_a_panel_each_and_failed_runs_no_time(tmp_path: Path) -> None:
    campaign = made_up(tmp_path, 6, ("ddp:2", "ddp:4"), fails="rollback")
    found = json.loads(write_numbers(campaign, None)[0])
    assert [(each["setting"]["parallel"], each["recovery"], each["failed"], each["overhead_seconds"]["count"])
            for each in found["strategies"]] == [
        (layout, recovery, *((2, 10) if recovery == "rollback" else (0, 12)))
        for layout in ("ddp:2", "ddp:4") for recovery in LOST
    ]  # fmt: skip
    (page,) = write_report(campaign, tmp_path / "page.html")
    assert "rollback (ddp:2) 2 of 12" in shown(page.read_text("utf-8"))


def test_two_recoveries_make_a_primary_question_and_three_need_a_contrast(tmp_path: Path) -> None:
    named = json.loads(write_numbers(made_up(tmp_path / "named", 3, contrast=["restart", "lossy"]), None)[0])
    assert (named["primary"]["a"], named["primary"]["b"], named["primary"]["pairs"]) == ("restart", "lossy", 6)
    assert named["primary"]["only_b"] == 6
    open_ = json.loads(write_numbers(made_up(tmp_path / "open", 3), None)[0])
    assert open_["primary"]["a"] is None


def test_a_campaign_without_a_trial_yet_has_a_page(tmp_path: Path) -> None:
    (page,) = write_report(made_up(tmp_path, 1, done=0), tmp_path / "page.html")
    assert "Nothing can be said yet: no trial is finished." in shown(page.read_text("utf-8"))


def test_the_table_of_trials_tells_each_death(campaign: Campaign, text: str, tmp_path: Path) -> None:
    with Page(tmp_path / "profile") as page:
        page.size(1100, 900)
        page.open(campaign.folder.report)
        assert page.value("document.querySelector('#trial-table thead th').textContent") == "deaths"
        page.value("document.querySelector('#trial-table tbody button.open').click()")
        told = page.value("document.querySelector('#trial-table td.fault').textContent")
        assert "deaths: rank:0@step:5:bucket:1" in told
        assert "overhead (s): 3" in told
        assert "steps done again: 5" in told
        assert page.problems() == []
