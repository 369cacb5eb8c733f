"""`flipper study mesh` as its users meet it."""

import csv
import importlib
import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import click
import pytest
from mesh_commands import here, rows

from flipper.cli.study import COMMANDS

RECORD = ["shape", "failed", "survivors", "algorithm", "bytes", "steps", "max_link_load", "conflicts", "seconds",
          "intact_seconds", "efficiency", "verified", "variant", "problem"]  # fmt: skip
OPTIONS = (
    "--shape --failed --algorithm --bytes --link-bandwidth --link-latency --model --samples-per-chip --gradients "
    "--chip-speed --utilization --compute-seconds --overlap --sweep --hole --every --no-proof --routes --execute "
    "--figure --report --format -q --quiet -v --verbose --traceback"
)


def test_the_options_are_those_that_were_decided():
    command = importlib.import_module("flipper.cli.study.mesh").command
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert sorted(word for option in options for word in option.opts) == sorted(OPTIONS.split())
    assert all(option.help for option in options)
    assert command.short_help == COMMANDS["mesh"]


def test_the_example_of_the_help_works_as_typed():
    text = here("study", "mesh", "--help")[1]
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("flipper study mesh"))
    found = rows(*line.split()[1:])
    assert [(row["survivors"], row["verified"]) for row in found] == [(508, True), (508, True)]


def test_a_row_for_each_algorithm_says_what_it_costs():
    ring, ring2d = rows("study", "mesh", "--shape", "8x8", "--failed", "2x2@2,2")
    assert list(ring) == list(ring2d) == RECORD
    assert [row["algorithm"] for row in (ring, ring2d)] == ["ring", "ring2d"]
    for row in (ring, ring2d):
        assert (row["shape"], row["failed"], row["survivors"], row["bytes"]) == ("8x8", ["2x2@2,2"], 60, 100_000_000)
        assert row["efficiency"] == pytest.approx(row["intact_seconds"] / row["seconds"])
        assert row["verified"] is True
    assert ring["steps"] == 2 * 59
    assert (ring["max_link_load"], ring["conflicts"]) == (1, 0)
    assert ring["seconds"] == pytest.approx(2 * 59 * (1e-6 + 1e8 / 120 / 70e9))


def test_links_and_bytes_can_be_changed():
    links = ["--link-bandwidth", "1e9", "--link-latency", "1e-3"]
    (row,) = rows("study", "mesh", "--shape", "4x4", "--algorithm", "ring", "--bytes", "32e6", *links)
    assert row["seconds"] == pytest.approx(2 * 15 * (1e-3 + 1e6 / 1e9))
    assert row["efficiency"] == 1


def test_models_add_what_a_step_costs():
    meshes = ["--shape", "4x4", "--shape", "8x8", "--failed", "2x2@0,0", "--algorithm", "ring2d"]
    training = ["--model", "resnet50", "--model", "bert-large", "--compute-seconds", "0.01", "--overlap", "0.5"]
    found = rows("study", "mesh", *meshes, *training)
    assert [(row["shape"], row["model"]) for row in found] == [
        ("4x4", "resnet50"), ("4x4", "bert-large"), ("8x8", "resnet50"), ("8x8", "bert-large")
    ]  # fmt: skip
    for row in found:
        step, intact = (0.01 + max(0.0, row[name] - 0.005) for name in ("seconds", "intact_seconds"))
        assert row["step_seconds"] == pytest.approx(step)
        assert row["step_overhead"] == pytest.approx(step / intact - 1)
        assert row["throughput"] == pytest.approx(row["survivors"] / int(row["shape"][0]) ** 2 * intact / step)
    assert found[0]["bytes"] == 4 * 25_557_032


def test_a_sweep_has_a_row_for_each_place_of_each_hole():
    found = rows("study", "mesh", "--shape", "6x8", "--sweep", "--hole", "1x1", "--hole", "2x3", "--every", "3")
    assert [row["failed"][0] for row in found[::2]] == [
        "0,0", "0,3", "0,6", "3,0", "3,3", "3,6", "2x3@0,0", "2x3@0,3", "2x3@3,0", "2x3@3,3"
    ]  # fmt: skip
    assert all(row["verified"] for row in found)


def test_routes_list_the_links_of_longer_ways():
    found = rows("study", "mesh", "--shape", "8x8", "--failed", "2x2@2,2", "--algorithm", "ring2d", "--routes")
    assert found
    for row in found:
        chips = [tuple(map(int, chip.split(","))) for chip in row["route"].split()]
        assert (len(chips) - 1, row["route"].split()[0], row["route"].split()[-1]) == (
            row["links"], row["source"], row["target"]
        )  # fmt: skip
        assert row["links"] > row["shortest"] == sum(abs(a - b) for a, b in zip(chips[0], chips[-1], strict=True))
        assert not {(2, 2), (2, 3), (3, 2), (3, 3)} & set(chips)


def test_what_one_algorithm_does_not_serve_is_a_row_that_says_so():
    holes = [word for hole in ("0,1", "1,3", "2,0", "3,2") for word in ("--failed", hole)]
    ring, ring2d = rows("study", "mesh", "--shape", "4x4", *holes)
    assert ring["verified"] is True
    assert (ring2d["seconds"], ring2d["verified"]) == (None, None)
    assert "each row and each column" in ring2d["problem"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "4x4", "--failed", "0,1", "--failed", "1,0"], "no scheme serves this mesh: 1 of 14 survivors"),
        (["--shape", "4x4", "--failed", "5,5"], "rows 0 to 3 and columns 0 to 3"),
        (["--shape", "4by4"], "give rows x columns, as 16x32"),
        (["--shape", "4x4", "--algorithm", "star"], "known: ring, ring2d"),
        (["--shape", "4x4", "--bytes", "8", "--model", "resnet50"], "leave one out"),
        (["--shape", "4x4", "--sweep", "--failed", "0,0"], "leave one out"),
        (["--shape", "4x4", "--hole", "1x1"], "--sweep"),
        (["--shape", "4x4", "--sweep", "--hole", "5x1"], "no room"),
        (["--shape", "4x4", "--sweep", "--hole", "big"], "as 2x2"),
        (["--shape", "4x4", "--sweep", "--routes"], "leave --sweep out"),
        (["--shape", "4x4", "--link-bandwidth", "0"], "bytes per second"),
        (["--shape", "4x4", "--bytes", "nan"], "1 or more"),
        (["--shape", "4x4", "--model", "resnet50", "--compute-seconds", "nan"], "no time that a step can take"),
        (["--shape", "10x10", "--execute"], "at most 64 and not 100"),
        ([], "Missing option '--shape'"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_clear_line(arguments, said):
    code, out, err = here("study", "mesh", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("flipper: error: ")
    assert "Traceback" not in err


def test_a_folder_that_is_not_there_is_told_before_the_work(tmp_path):
    code, out, err = here("study", "mesh", "--shape", "4x4", "--report", tmp_path / "none" / "page.html")
    assert (code, out) == (1, "")
    assert "there is no folder" in err


def test_execute_really_runs_it():
    (row,) = rows("study", "mesh", "--shape", "2x3", "--failed", "0,1", "--algorithm", "ring", "--execute")
    assert row["executed"] is True
    assert row["executed_seconds"] > 0


def test_a_schedule_that_is_not_proved_ends_with_3(monkeypatch):
    import flipper.mesh.study

    wrong = flipper.mesh.proof.Proof("made up")
    monkeypatch.setattr(flipper.mesh.study, "prove", lambda schedule: wrong)
    code, out, _ = here("study", "mesh", "--shape", "4x4", "--algorithm", "ring", "--format", "json")
    assert code == 3
    assert [(row["verified"], row["problem"]) for row in json.loads(out)] == [(False, "made up")]


def test_csv_has_the_columns_in_their_order():
    code, out, _ = here("study", "mesh", "--shape", "4x4", "--algorithm", "ring", "--format", "csv")
    assert code == 0
    assert next(csv.reader(io.StringIO(out))) == RECORD


def test_the_figure_shows_every_chip_and_the_failed_ones(tmp_path):
    path = tmp_path / "mesh.svg"
    code, _, err = here("study", "mesh", "--shape", "4x6", "--failed", "2x2@0,2", "--failed", "3,5", "--figure", path)
    assert (code, err) == (0, f"wrote {path}\n")
    titles = [each.text for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}title")]
    for pictured in (titles[:24], titles[24:]):  # one for each algorithm
        assert [title for title in pictured if title.endswith("failed")] == [
            "chip 0,2: failed", "chip 0,3: failed", "chip 1,2: failed", "chip 1,3: failed", "chip 3,5: failed"
        ]  # fmt: skip
        assert [title for title in pictured if not title.endswith("failed")][-1] == "chip 3,4: rank 18"


def test_the_page_stands_alone_and_says_what_is_left(tmp_path):
    path = tmp_path / "mesh.html"
    asked = ["study", "mesh", "--shape", "8x8", "--failed", "2x2@2,2", "--model", "resnet50"]
    code, _, err = here(*asked, "--report", path)
    assert (code, err) == (0, f"wrote {path}\n")
    text = path.read_text("utf-8")
    assert text.count("<svg") == 2
    for outside in ("http:", "https:", "<script", "<link", "@import"):
        assert outside not in text.replace("http-equiv", "")
    row, _ = rows(*asked)
    assert f"{100 * row['efficiency']:.1f} % of the throughput" in text


def test_the_page_of_a_sweep_maps_it(tmp_path):
    path = tmp_path / "sweep.html"
    code, _, _ = here("study", "mesh", "--shape", "4x4", "--sweep", "--hole", "2x2", "--every", "1", "--no-proof",
                      "--report", path)  # fmt: skip
    assert code == 0
    text = path.read_text("utf-8")
    assert text.count("% of the intact mesh</title>") == 2 * 9


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path):
    root = Path(__file__).parents[2]
    lines = (root / "README.md").read_text("utf-8").splitlines()
    command = next(line for line in lines if "--figure mesh-8x8.svg" in line)
    words = command.removeprefix("$ flipper ").partition(" |")[0].replace("mesh-8x8.svg", str(tmp_path / "drawn.svg"))
    assert here(*words.split())[0] == 0
    assert (tmp_path / "drawn.svg").read_bytes() == (root / "scripts/pictures/mesh-8x8.svg").read_bytes()
