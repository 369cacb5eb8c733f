"""The figures as files for a paper, and the command that writes them."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_up_campaign import ALL_BENIGN, made_up

from flipper.campaigns.folder import Campaign
from flipper.cli.campaign.report import command
from flipper.report.figures import curves
from flipper.report.material import material_of

FIGURES = {"outcomes", "bits-by-layer", "curves", "paired", "exposure", "replicas", "detectors"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return made_up(tmp_path_factory.mktemp("made-up"), trials=10, probe_every=5)


@pytest.fixture(scope="module")
def figures(campaign: Campaign, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper") / "figures"
    done = CliRunner().invoke(command, [str(campaign.folder.path), "--figures", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout == ""
    names = [campaign.folder.report, *(folder / f"{name}.{kind}" for name in FIGURES for kind in ("pdf", "svg"))]
    assert sorted(done.stderr.splitlines()) == sorted(f"wrote {name}" for name in names)
    return folder


def test_each_figure_is_there_in_both_formats(figures: Path) -> None:
    names = {path.name for path in figures.iterdir()}
    assert names == {f"{name}.{kind}" for name in FIGURES for kind in ("pdf", "svg")}


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_svg_needs_no_font_and_has_the_width_of_a_page(figures: Path, name: str) -> None:
    root = ElementTree.parse(figures / f"{name}.svg").getroot()
    assert root.tag == f"{SVG}svg"
    assert root.attrib["width"] == "496.8pt"  # 6.9 inches
    assert float(root.attrib["height"].removesuffix("pt")) > 72
    assert not root.findall(f".//{SVG}text")
    assert not root.findall(f".//{SVG}image")
    assert len(root.findall(f".//{SVG}path")) > 20


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_pdf_is_one_page_with_its_fonts_inside(figures: Path, name: str) -> None:
    data = (figures / f"{name}.pdf").read_bytes()
    assert data.startswith(b"%PDF-1.4")
    assert data.rstrip().endswith(b"%%EOF")
    start = int(re.findall(rb"startxref\s+(\d+)", data)[-1])
    assert data[start:].startswith(b"xref")
    assert b"/Count 1" in data
    assert b"/FontFile2" in data
    assert b"/Type3" not in data
    assert b"/Subtype /Image" not in data
    content = max(
        (zlib.decompress(part) for part in re.findall(rb"FlateDecode.*?stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
         if part[:1] == b"\x78"),
        key=len,
    )  # fmt: skip
    assert len(content) > 1000


def test_the_same_results_give_the_same_figures(campaign: Campaign, figures: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = [
        str(campaign.folder.path),
        "--format",
        "json",
        "-o",
        str(numbers),
        "--figures",
        str(tmp_path / "f"),
        "-q",
    ]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "")
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()} == {
        path.name: path.read_bytes() for path in figures.iterdir()
    }
    printed = CliRunner().invoke(command, [str(campaign.folder.path), "--format", "json"], catch_exceptions=False)
    assert printed.stdout == numbers.read_text("utf-8")
    assert json.loads(printed.stdout)["primary"]["pairs"] == 60


def test_only_what_there_is_to_show_is_drawn(tmp_path: Path) -> None:
    campaign = made_up(tmp_path / "made", layouts=("single",), outcomes=ALL_BENIGN, counts=(100,))
    arguments = [str(campaign.folder.path), "--figures", str(tmp_path / "figures")]
    assert CliRunner().invoke(command, arguments, catch_exceptions=False).exit_code == 0
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"outcomes", "curves", "exposure"}


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2", "scipy"])
def test_a_missing_library_is_one_clear_line(campaign: Campaign, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from flipper.cli import main; main(sys.argv[1:])"
    arguments = ["campaign", "report", str(campaign.folder.path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"flipper: error: a report needs {missing}, which is not installed; pip install 'flipper-ckpt[report]'\n"
    )


def test_no_campaign_is_one_clear_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flipper", "campaign", "report", str(tmp_path)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "campaign.json" in done.stderr


def test_golden_curves_begin_shortly_before_the_faults(campaign: Campaign) -> None:
    """So that a long training leaves room for what came after them."""
    picture = curves.draw(material_of(campaign))
    assert picture is not None
    for axes in picture.figure.axes:
        *golden, struck = (line.get_xdata() for line in axes.get_lines())
        (fault,) = set(struck)
        last = max(max(steps) for steps in golden)
        assert all(fault - (last - fault) / 2 <= min(steps) <= fault for steps in golden)
