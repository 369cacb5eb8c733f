"""The page as a parser sees it: its parts, its numbers, what it refuses to do, and campaigns of odd shapes."""

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_up_campaign import ALL_BENIGN, TENSORS, made_up

from flipper.campaigns.folder import Campaign
from flipper.campaigns.results import load_results, rows
from flipper.campaigns.store import Store
from flipper.campaigns.summary import summary
from flipper.errors import OutputError, UsageError
from flipper.report.writing import write_numbers, write_report
from flipper.strict_json import strict

VOID = {"meta", "link", "br", "img", "input", "hr"}
PARTS = (
    "answer", "limits", "outcomes", "bits", "curves", "paired", "exposure", "replicas", "detectors", "trials",
    "checks", "provenance",
)  # fmt: skip
FIGURES = ("outcomes", "bits-by-layer", "curves", "paired", "exposure", "replicas", "detectors")

HOSTILE = (
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>", "$\\frac{1", 'a"b\'c & <b>d', "line\nbreak",
    "\u5c64.weight", "{{ 7 * 191 }}", "l" * 300,
)  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of it: tags with attributes, texts, tables; complains about what does not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)
        match tag:
            case "table":
                self._rows, self._caption = [], ""
            case "tr":
                self._rows.append([])
            case "td" | "th":
                self._rows[-1].append("")
            case "script":
                self.scripts.append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self.tables[self._caption.split(" (")[0]] = self._rows

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
            return
        self.texts.append(data)
        if "caption" in self._open:
            self._caption += data
        elif "td" in self._open or "th" in self._open:
            self._rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All that is to be read."""
        return "".join(self.texts)

    def values(self, tag: str, attribute: str) -> list[str | None]:
        """An attribute of all tags of a kind."""
        return [attributes[attribute] for name, attributes in self.tags if name == tag and attribute in attributes]

    @property
    def data(self) -> Any:
        """What the table of trials is made from."""
        return json.loads(self.scripts[0])

    def columns(self, caption: str) -> Iterator[dict[str, str]]:
        """The rows of a table by its headings."""
        head, *body = self.tables[caption]
        for row in body:
            assert len(row) == len(head)
            yield dict(zip(head, row, strict=True))


def page_of(campaign: Campaign) -> Page:
    """The page, written and read."""
    (path,) = write_report(campaign)
    assert path == campaign.folder.path / "report.html"
    return Page(path.read_text("utf-8"))


def numbers_of(campaign: Campaign) -> Any:
    """What `report --format json` prints."""
    return json.loads(write_numbers(campaign, None)[0])


def near(shown: str, value: float | None, times: float = 1.0) -> bool:
    """Whether a shown number is the value, by three digits."""
    if value is None:
        return shown == "–"
    plain = re.sub(r" × 10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda found: "e" + found[1].translate(DIGITS), shown)
    number = float(plain.replace("−", "-").replace(",", "").rstrip("%"))
    return math.isclose(number, times * value, rel_tol=0.006, abs_tol=1e-300)


DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return made_up(tmp_path_factory.mktemp("made-up"), trials=20, probe_every=5)


@pytest.fixture(scope="module")
def page(campaign: Campaign) -> Page:
    return page_of(campaign)


def test_all_parts_are_there_and_links_lead_to_them(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(PARTS) <= set(ids)
    assert {f"figure-{name}" for name in FIGURES} <= set(ids)
    for link in page.values("a", "href"):
        assert link is not None
        assert link[0] == "#"
        assert link[1:] in ids
    for reference in re.findall(r"url\(#([^)]+)\)", str(page.tags)) + [
        str(link)[1:] for link in page.values("use", "xlink:href")
    ]:
        assert reference in ids


def test_the_answer_stands_before_everything_else(page: Page) -> None:
    order = [attributes["id"] for _, attributes in page.tags if attributes.get("id") in PARTS]
    assert order[:2] == ["answer", "limits"]


def test_nothing_is_asked_for_from_outside(campaign: Campaign, page: Page) -> None:
    raw = campaign.folder.report.read_text("utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", raw.replace(page.scripts[1], ""))
    assert "http" not in page.scripts[1]
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    assert all("src" not in attributes for _, attributes in page.tags)
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_figures_have_words_for_those_who_do_not_see_them(page: Page) -> None:
    figures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(figures) == len(FIGURES)
    for attributes in figures:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"] or "") > 60
    assert len([tag for tag, _ in page.tags if tag == "figcaption"]) == len(FIGURES)
    raw = [attributes.get("style") or "" for _, attributes in page.tags]
    assert not [style for style in raw if re.search("#[0-9a-f]{6}", style)]  # all colours follow the page's


def test_outcomes_are_those_of_the_numbers(campaign: Campaign, page: Page) -> None:
    cells = numbers_of(campaign)["cells"]
    shown = list(page.columns("Outcomes by cell"))
    assert len(shown) == len(cells) == 12
    for row, cell in zip(shown, cells, strict=True):
        assert (row["cell"], row["layout"], row["bits"]) == (str(cell["cell"]), cell["parallel"], cell["bits"])
        assert int(row["trials"]) == cell["trials"]
        for name, outcome in cell["outcomes"].items():
            assert int(row.get(name, "0")) == outcome["count"]
        harm = cell["not_benign"]
        assert int(row["harmful"]) == harm["count"]
        assert near(row["share"], harm["proportion"], 100)
        for column, low, high in (("Wilson 95%", "low", "high"), ("Clopper–Pearson 95%", "exact_low", "exact_high")):
            left, right = row[column].split(" to ")
            assert near(left, harm[low], 100)
            assert near(right, harm[high], 100)
        assert near(row["none seen: at most (one-sided)"], harm.get("at_most"), 100)


def test_comparisons_are_those_of_the_numbers(campaign: Campaign, page: Page) -> None:
    comparisons = numbers_of(campaign)["comparisons"]
    shown = list(page.columns("Differences of harmful shares, in percentage points"))
    assert len(shown) == len(comparisons) == 6
    for row, each in zip(shown, comparisons, strict=True):
        assert row["first − second"] == f"{each['a']} − {each['b']}"
        assert row["within"] == f"{each['within']['bits']}, count {each['within']['count']}"
        counts = [int(row[column]) for column in ("pairs", "only first", "only second")]
        assert counts == [each["pairs"], each["only_a"], each["only_b"]]
        left, right = row["95% interval"].split(" to ")
        for text, key in ((row["difference"], "difference"), (left, "low"), (right, "high")):
            assert near(text, each[key], 100)
        assert near(row["p"], each["p"])
        assert near(row["p (Holm)"], each["p_holm"])
        assert row["equivalent within ±5"] == ("yes" if each["equivalent"] else "not shown")


def test_the_rest_of_the_numbers_too(campaign: Campaign, page: Page) -> None:
    numbers = numbers_of(campaign)
    for row, each in zip(page.columns("Resident bits and the rate of harm"), numbers["exposure"], strict=True):
        assert row["layout"] == each["parallel"]
        assert int(row["bits resident"].replace(",", "")) == each["bits_resident"]
        assert near(row["probability"], each["probability"], 100)
        assert near(row["harmful in a job-hour"], each["rate_per_job_hour"])
        left, right = row["95% interval"].split(" to ")
        assert near(left, each["low"])
        assert near(right, each["high"])
    for row, each in zip(page.columns("Trials that each detector saw"), numbers["detectors"], strict=True):
        assert row["detector"] == each["detector"]
        assert row["harmful trials seen"] == f"{each['harmful']['count']} of {each['harmful']['of']}"
        assert row["benign trials seen"] == f"{each['benign']['count']} of {each['benign']['of']}"
    seen = [row["first_detector"] is not None for row in rows(load_results(campaign)) if row["group"] != "benign"]
    assert f"Some detector saw {sum(seen)} of {len(seen)} harmful trials" in page.text
    assert 0 < sum(seen) < len(seen)
    for row, each in zip(page.columns("Null trials"), numbers["null"], strict=True):
        assert near(row["band (accuracy)"], each["band"])
        assert int(row["called harmful"]) == each["false_alarms"]["count"]
        assert int(row["tested"]) == each["tested"]
    for row, each in zip(page.columns("Golden runs and their controls"), numbers["controls"], strict=True):
        assert (row["layout"], row["training seed"]) == (each["parallel"], str(each["training_seed"]))
        assert (row["control identical"] == "yes, bit for bit") == each["identical"]
    for limit in numbers["limits"]:
        assert limit in page.text
    assert f"{numbers['savings']['steps']:,} steps" in page.text


def test_exact_values_stand_in_the_page(campaign: Campaign, page: Page) -> None:
    main, values = numbers_of(campaign)["primary"], set(page.values("data", "value"))
    for key in ("difference", "low", "high", "p", "equivalence_p"):
        assert repr(main[key]) in values


def test_the_table_has_every_trial_and_what_it_struck(campaign: Campaign, page: Page) -> None:
    data = page.data
    exported = list(rows(load_results(campaign)))
    assert len(data["rows"]) == len(exported) == 240
    with Store(campaign.folder.results()) as store:
        stored = {(run.cell, run.trial): run for run in store.runs("trial", detail=True)}
    for row, wanted in zip(data["rows"], exported, strict=True):
        assert row[:2] == [wanted["cell"], wanted["trial"]]
        assert data["texts"][row[2]] == str(wanted["training_seed"])
        assert data["outcomes"][row[3]] == wanted["outcome"]
        assert row[4:8] == strict(
            [wanted["metric_final"], wanted["metric_golden"], wanted["loss_final"], wanted["steps_to_recover"]]
        )
        assert (None if row[8] is None else data["texts"][row[8]]) == wanted["first_detector"]
        run = stored[row[0], row[1]]
        assert row[10] == run.struck
        assert len(row[12]) == min(run.struck, 5)
        for fault, (name, element, bits, before, after) in zip(row[12], run.faults, strict=False):
            assert [data["tensors"][fault[0]], *fault[1:3]] == [name, element, bits]
            assert fault[3:] == pytest.approx([before, after], rel=1e-6)
        assert (None if row[13] is None else data["texts"][row[13]]) == run.error
        assert row[14][0] == str(wanted["seed"])
        assert row[14][1:4] == [
            None if wanted[name] is None else pytest.approx(wanted[name], rel=1e-6)
            for name in ("max_excursion", "area", "state_distance")
        ]


def test_the_heat_map_counts_a_trial_once_for_each_place(campaign: Campaign, page: Page) -> None:
    results = load_results(campaign)
    harmful = {(trial.cell.number, trial.run.trial): trial.harmful for trial in results.trials}
    struck: dict[str, list[bool]] = {}
    places: dict[tuple[str, str], list[bool]] = {}
    with Store(campaign.folder.results()) as store:
        for run in store.runs("trial", detail=True):
            assert run.struck <= 10
            for bit in {bits[0] for _, _, bits, _, _ in run.faults}:
                struck.setdefault(str(bit), []).append(harmful[run.cell, run.trial])
            for tensor, bit in {(tensor, bits[0]) for tensor, _, bits, _, _ in run.faults}:
                places.setdefault((tensor, str(bit)), []).append(harmful[run.cell, run.trial])
    shown = list(page.columns("Harm by bit, all layers"))
    assert [row["bit"] for row in shown] == sorted(struck, key=int, reverse=True)
    for row in shown:
        mine = struck[row["bit"]]
        assert (int(row["harmful"]), int(row["of trials that struck it"])) == (sum(mine), len(mine))
    for row in page.columns("Places with harm, the largest shares first"):
        mine = places[row["layer"], row["bit"]]
        assert (int(row["harmful"]), int(row["of"])) == (sum(mine), len(mine))


def test_the_same_results_give_the_same_page(campaign: Campaign, page: Page, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    assert write_report(campaign, again) == [again]
    assert again.read_bytes() == campaign.folder.report.read_bytes()


def test_names_from_files_do_nothing(tmp_path: Path) -> None:
    campaign = made_up(tmp_path, tensors=HOSTILE, name="<b>bold & 'more'", trials=8)
    page = page_of(campaign)
    assert len(page.scripts) == 2
    assert not {"b", "img"} & {tag for tag, _ in page.tags}
    assert page.text.count("<b>bold & 'more'") >= 2
    shown = {row["layer"] for row in page.columns("Places with harm, the largest shares first")}
    assert shown <= set(HOSTILE)
    assert {HOSTILE[0], HOSTILE[3]} <= shown
    assert set(page.data["tensors"]) <= set(HOSTILE)
    assert "<" not in page.scripts[0]
    assert "1337" not in page.text


def test_hostile_commands_checkpoints_and_errors_do_nothing(tmp_path: Path) -> None:
    names = ["<i>ddp", "$x_{"]
    campaign = made_up(tmp_path, layouts=names, checkpoint="<u>a.pt", contrast=names)
    database = sqlite3.connect(campaign.folder.results())
    with database:
        database.execute("UPDATE runs SET summary = replace(summary, 'rank 1 ended', '<s>rank ended')")
    database.close()
    page = page_of(campaign)
    assert not {"i", "u", "s"} & {tag for tag, _ in page.tags}
    assert " under <i>ddp" in page.text
    assert any("<s>rank" in text for text in page.data["texts"])


def test_no_trial_yet(tmp_path: Path) -> None:
    page = page_of(made_up(tmp_path, done=0))
    assert "No trial is finished yet." in page.text
    assert page.data["rows"] == []
    assert len([row for row in page.columns("Outcomes by cell") if row["share"] == "–"]) == 12


def test_nothing_stored(tmp_path: Path) -> None:
    campaign = made_up(tmp_path)
    campaign.folder.results().unlink()
    with pytest.raises(UsageError, match="no results yet"):
        write_report(campaign)
    assert not campaign.folder.report.exists()


def test_one_layout_one_seed(tmp_path: Path) -> None:
    page = page_of(made_up(tmp_path, layouts=("single",), seeds=(1,), counts=(1,)))
    assert "this campaign says nothing on how layouts differ" in page.text
    assert "One training seed" in page.text
    assert "figure-paired" not in [attributes.get("id") for _, attributes in page.tags]


def test_all_benign(tmp_path: Path) -> None:
    campaign = made_up(tmp_path, outcomes=ALL_BENIGN)
    page = page_of(campaign)
    assert {row["harmful"] for row in page.columns("Outcomes by cell")} == {"0"}
    assert "Harmful (not benign) were 0 of 36 trials (0%)" in page.text
    assert "Places with harm, the largest shares first" not in page.tables
    assert "No detector raised an alarm" in page.text


def test_only_failures(tmp_path: Path) -> None:
    page = page_of(made_up(tmp_path, outcomes=("hang", "crash", "refused"), counts=(100,)))
    assert "No struck run was evaluated." in page.text
    assert {row["share"] for row in page.columns("Outcomes by cell")} == {"100%"}


def test_many_layouts_cells_and_tensors(tmp_path: Path) -> None:
    tensors = tuple(f"{layer}{part}" for layer in range(60) for part in (".weight", ".bias"))
    campaign = made_up(
        tmp_path, trials=2, layouts=("ddp:2", "hooks:2", "fsdp:2", "tensor:2", "pipeline:2", "single"),
        counts=tuple(range(1, 10)), tensors=tensors, seeds=(1,),
    )  # fmt: skip
    page = page_of(campaign)
    assert len(list(page.columns("Outcomes by cell"))) == 162
    assert "Bars are drawn for the first 150 of 162 cells." in page.text
    assert "The 40 most struck rows are drawn." in page.text
    assert {row["layer"] for row in page.columns("Places with harm, the largest shares first")} <= {
        str(layer) for layer in range(60)
    }


def test_a_margin_and_a_census_are_told(tmp_path: Path) -> None:
    page = page_of(made_up(tmp_path / "margin", trials=60, margin=0.2, counts=(1,)))
    column = "sequential: share at the stop"
    assert all(re.match(r"[\d.]+% to [\d.]+% after \d+", row[column]) for row in page.columns("Outcomes by cell"))
    page = page_of(made_up(tmp_path / "census", census=True, counts=(1,)))
    assert "not finished" not in page.text


def test_loss_is_better_when_lower(tmp_path: Path) -> None:
    page = page_of(made_up(tmp_path, metric="loss"))
    assert "loss, lower is better" in page.text


def test_the_page_replaces_the_one_before_and_names_what_cannot_be_written(campaign: Campaign, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    assert write_report(campaign, target) == [target]
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(OutputError, match="no folder"):
        write_report(campaign, tmp_path / "nowhere" / "page.html")
    with pytest.raises(OutputError, match="can't be written"):
        write_report(campaign, figures=target)


def test_the_numbers_are_the_summary_of_the_results(campaign: Campaign) -> None:
    assert numbers_of(campaign) == json.loads(json.dumps(strict(summary(load_results(campaign, detail=True)))))
    assert TENSORS[0].startswith("model.")
