"""The page in headless Chromium, opened from its file: no errors, a table that works, on phones and in the dark."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium_page import Page
from made_up_campaign import made_up

from flipper.campaigns.folder import Campaign
from flipper.campaigns.results import load_results, rows
from flipper.report.writing import write_report


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    names = ("<script>window.bad = 1</script>", "</script><img src=x onerror='window.bad = 2'>", "model.fc.weight")
    return made_up(tmp_path_factory.mktemp("made-up"), trials=20, tensors=names, probe_every=5, counts=(1, 10, 100))


@pytest.fixture(scope="module")
def exported(campaign: Campaign) -> list[dict[str, Any]]:
    return list(rows(load_results(campaign)))


@pytest.fixture(scope="module")
def browser(campaign: Campaign, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as opened:
        write_report(campaign)
        yield opened


@pytest.fixture
def page(campaign: Campaign, browser: Page) -> Iterator[Page]:
    """The page, just opened in a wide window; afterwards nothing may have gone wrong in it."""
    browser.size(1100, 900)
    browser.call("Emulation.setEmulatedMedia", media="", features=[])
    browser.events.clear()
    browser.open(campaign.folder.report)
    yield browser
    assert browser.problems() == []
    assert browser.requests() == [campaign.folder.report.resolve().as_uri()]
    assert browser.value("window.bad === undefined")


def column(page: Page, name: str) -> list[str]:
    """What the table shows in a column."""
    return page.value(
        f"""(() => {{
        const heads = [...document.querySelectorAll("#trial-table thead th")].map((cell) => cell.textContent);
        const at = heads.indexOf({name!r});
        return [...document.querySelectorAll("#trial-table tbody tr")].map((line) => line.cells[at].textContent);
        }})()"""
    )


def click(page: Page, heading: str) -> None:
    page.value(
        f"""[...document.querySelectorAll("#trial-table thead button")]
        .find((button) => button.textContent === {heading!r}).click()"""
    )


def select(page: Page, name: str, value: str) -> None:
    page.value(
        f"""(() => {{
        const label = [...document.querySelectorAll(".controls label")].find((l) => l.firstChild.data === {name!r});
        label.lastChild.value = {value!r};
        label.lastChild.dispatchEvent(new Event("change"));
        }})()"""
    )


def told(page: Page) -> str:
    return str(page.value("document.querySelector('.pages [role=status]').textContent"))


def test_the_table_sorts_both_ways(page: Page, exported: list[dict[str, Any]]) -> None:
    assert told(page) == "1–25 of 360 trials"
    assert column(page, "cell") == ["0"] * 20 + ["1"] * 5
    click(page, "final loss")
    losses = sorted(row["loss_final"] for row in exported if row["loss_final"] == row["loss_final"] is not None)
    assert [float(shown) for shown in column(page, "final loss")] == pytest.approx(losses[:25])
    assert page.value("document.querySelectorAll('#trial-table th[aria-sort=ascending]').length") == 1
    click(page, "trial")
    click(page, "trial")
    assert column(page, "trial") == ["19"] * 18 + ["18"] * 7
    assert page.value("document.querySelector('#trial-table th[aria-sort=descending]').textContent") == "trial"
    click(page, "final metric")
    click(page, "final metric")
    best = sorted((row["metric_final"] for row in exported if row["metric_final"] is not None), reverse=True)
    assert [float(shown) for shown in column(page, "final metric")] == pytest.approx(best[:25])


def test_missing_values_stand_last(page: Page) -> None:
    for _ in range(2):
        click(page, "steps to recover")
        assert "–" not in column(page, "steps to recover")


def test_the_table_filters(page: Page, exported: list[dict[str, Any]]) -> None:
    select(page, "outcome", "degraded")
    wanted = [row for row in exported if row["outcome"] == "degraded"]
    assert told(page).endswith(f"of {len(wanted)} trials (of 360 in all)")
    assert set(column(page, "outcome")) == {"degraded"}
    select(page, "layout", "pipeline:2")
    wanted = [row for row in wanted if row["parallel"] == "pipeline:2"]
    assert f" of {len(wanted)} trials" in told(page)
    select(page, "outcome", "")
    select(page, "harmful", "harmful")
    wanted = [row for row in exported if row["parallel"] == "pipeline:2" and row["group"] != "benign"]
    assert f" of {len(wanted)} trials" in told(page)
    assert not {"masked", "identical", "recovered"} & set(column(page, "outcome"))


def test_the_table_is_searched_down_to_the_bits(page: Page, campaign: Campaign) -> None:
    from flipper.campaigns.store import Store

    with Store(campaign.folder.results()) as store:
        runs = list(store.runs("trial", detail=True))
    wanted = [run for run in runs if any(f[0] == "model.fc.weight" and f[2] == [30] for f in run.faults[:5])]
    assert wanted
    page.value(
        """(() => { const field = document.querySelector("input[type=search]");
        field.value = '"model.fc.weight bit 30"'; field.dispatchEvent(new Event("input")); })()"""
    )
    assert f"of {len(wanted)} trials" in told(page)


def test_struck_bits_are_shown_where_they_are_asked_for(page: Page, campaign: Campaign) -> None:
    from flipper.campaigns.store import Store

    with Store(campaign.folder.results()) as store:
        first = next(iter(store.runs("trial", detail=True)))
    page.value("document.querySelector('#trial-table tbody button').click()")
    assert page.value("document.querySelector('#trial-table tbody button').getAttribute('aria-expanded')") == "true"
    shown = page.value("document.querySelector('#trial-table td.fault').textContent")
    assert first.faults[0][0] in shown
    assert f"flipper campaign trial {campaign.folder.path.name} --cell 0 --trial 0" in shown
    page.value("document.querySelector('#trial-table tbody button').click()")
    assert page.value("document.querySelectorAll('#trial-table td.fault').length") == 0
    select(page, "count", "100")
    page.value("document.querySelector('#trial-table tbody button').click()")
    assert "and 95 more faults" in page.value("document.querySelector('#trial-table td.fault').textContent")


def test_pages_are_turned_and_keys_are_enough(page: Page) -> None:
    press = """[...document.querySelectorAll(".pages button")].find((b) => b.textContent === "Next")"""
    page.value(f"{press}.focus()")
    page.key("Enter", 13, "\r")
    assert told(page) == "26–50 of 360 trials"
    page.key(" ", 32, " ")
    assert told(page) == "51–75 of 360 trials"
    page.value("document.querySelector('#trial-table thead button').focus()")
    page.key("Tab", 9)
    assert page.value("document.activeElement.textContent") == "layout"
    page.key("Enter", 13, "\r")
    assert page.value("document.activeElement.parentNode.getAttribute('aria-sort')") == "ascending"
    assert told(page) == "1–25 of 360 trials"
    assert set(column(page, "layout")) == {"ddp:2"}


def test_a_phone_scrolls_down_only(page: Page) -> None:
    page.size(375, 700, phone=True)
    assert page.value("[innerWidth, document.documentElement.scrollWidth]") == [375, 375]
    wide = page.value(
        """[...document.querySelectorAll("body *")].filter((e) => !e.closest(".wide, .table")
        && e.getBoundingClientRect().right > 376).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert wide == []
    assert (
        page.value("document.querySelector('#figure-outcomes .wide').scrollWidth") > 500
    )  # legible: it scrolls itself


def test_dark_pages_have_dark_figures(page: Page, tmp_path: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        colours = page.value(
            """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
            ...[...document.querySelectorAll("svg")].map((s) => getComputedStyle(s.querySelector("text")).fill)]"""
        )
        seen[scheme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours]
        page.screenshot(tmp_path / f"{scheme}.png")
    assert seen["light"][0] > 240
    assert seen["dark"][0] < 40
    assert all(level < 90 for level in seen["light"][1:])
    assert all(level > 200 for level in seen["dark"][1:])
    assert len(seen["dark"]) == 9
    from matplotlib.image import imread

    light, dark = (imread(tmp_path / f"{scheme}.png")[..., :3].mean() for scheme in ("light", "dark"))
    assert light > 0.85
    assert dark < 0.25


def test_paper_is_light_and_has_all_parts(page: Page, tmp_path: Path) -> None:
    page.prefer("dark")
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(254, 254, 254)"
    assert page.value("getComputedStyle(document.querySelector('.controls')).display") == "none"
    page.print(tmp_path / "page.pdf")
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", data)) >= 4


def test_texts_in_figures_do_not_overlap(page: Page) -> None:
    overlaps = page.value(
        """[...document.querySelectorAll("svg")].flatMap((svg) => {
        const boxes = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
        return boxes.flatMap(([a, one], i) => boxes.slice(i + 1).filter(([b, two]) =>
          Math.min(one.right, two.right) - Math.max(one.left, two.left) > 2 &&
          Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top) > 4).map(([b]) => [a, b]));
        })"""
    )
    assert overlaps == []
