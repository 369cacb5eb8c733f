"""The page of a study: what it says first, its figures, its table; nothing from outside."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flipper.errors import OutputError
from flipper.study import figures
from flipper.study.checkpoint import Study
from flipper.study.page import html
from flipper.study.rows import Measured
from flipper.study.spec import StudySpec
from flipper.study.writing import check_drawable, write_page

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "circle", "line", "polyline", "polygon"}


def made_up(recipe: str | None = "digits-cnn", cold: float | None = 0.03, **options: Any) -> Study:
    """Rows of every kind, of invented times."""
    spec = StudySpec(
        recipe, formats=("pytorch", "dcp"), contents=("model", "all"), modes=("sync", "async"), repeat=2, **options
    )
    measured = Measured(0.01, 22) if recipe else Measured()
    rows = []
    for number, combination in enumerate(spec.combinations(1)):
        seconds = 0.001 * (number + 1) * (10 if combination.content == "all" else 1)
        measured.samples[number] = [
            {"save_seconds": seconds * part, "load_seconds": seconds * part, "cold_load_seconds": cold,
             "stall_seconds": seconds * part / 2, "peak_bytes": 5000 * number, "bytes": 10_000 * (number + 1)}
            for part in (1.0, 2.0)
        ]  # fmt: skip
        if recipe:
            missing = ["optimizer", "RNG"] if combination.content == "model" else []
            measured.missing[combination.format, combination.content, combination.mode] = missing
        rows.append(measured.row(number, combination, spec.mtbf))
    return Study(spec, rows, {1: 0.01} if recipe else {}, {"cpu": "a <processor>"}, "ext4")


class Balanced(HTMLParser):
    """Collects text and addresses; fails on tags that don't close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


def read(page: str) -> tuple[str, Balanced]:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return re.sub(r"\s+", " ", "".join(parser.texts)), parser


def test_the_page_compares_only_what_a_run_goes_on_from_and_says_what_others_lack() -> None:
    """The quickest of all is no checkpoint to go on from."""
    page = html(made_up(mtbf=3600.0))
    text, parser = read(page)
    assert "Of the checkpoints from which a run goes on to the bit, pytorch (content all, 1 rank) holds up" in text
    assert "From content model a run does not go on to the bit, for want of: optimizer, RNG." in text
    assert "a <processor>" in text
    assert all(address.startswith("#") for address in parser.addresses)
    assert "default-src 'none'" in page
    assert page.count("<figure") == page.count("<svg") == 3
    for label in ("pytorch", "dcp, async"):
        assert label in text
    assert text.count("no: optimizer, RNG") == 3


def test_a_study_of_tensors_has_no_epochs_and_no_restarts() -> None:
    page = html(made_up(None, None, synthetic=10_000_000))
    text, _ = read(page)
    assert "10.0 MB made up" in text
    assert "to the bit," not in text
    assert "Loading from the disk was not measured: the file system (ext4) keeps files in memory." in text
    assert page.count("<figure") == 2
    assert "With --mtbf DURATION there is a curve here" in text


def test_the_page_is_written_whole_and_a_place_that_is_none_is_told_before(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    check_drawable(target)
    write_page(made_up(), target)
    assert target.read_text("utf-8").endswith("</html>")
    with pytest.raises(OutputError, match="there is no such folder"):
        check_drawable(tmp_path / "none" / "page.html")
    with pytest.raises(OutputError, match="it is a folder"):
        check_drawable(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000025, "2.50 µs"),
        (0.0025, "2.50 ms"),
        (2.5, "2.50 s"),
        (150, "2.50 min"),
        (9000, "2.50 h"),
        (216000, "2.50 d"),
    ],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text


@pytest.mark.parametrize(
    ("contents", "labels"),
    [(("all",), ["50 ms", "100 ms"]), (("model", "all"), ["1 ms", "10 ms", "100 ms"])],
)
def test_times_near_each_other_have_a_scale_too(contents: tuple[str, ...], labels: list[str]) -> None:
    """Powers of ten alone would leave the figure with one label."""
    study = made_up()
    picture = figures.times(replace(study, rows=[row for row in study.rows if row["content"] in contents]))
    (axes,) = picture.figure.axes
    picture.figure.canvas.draw()
    least, most = axes.get_xlim()
    shown = [label.get_text() for label in axes.get_xticklabels() if least <= label.get_position()[0] <= most]
    assert shown == labels
