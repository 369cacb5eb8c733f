"""`flipper study checkpoint` as a user types it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import click
import pytest

from flipper.cli import main
from flipper.cli.study import COMMANDS
from flipper.cli.study.checkpoint import command
from flipper.study.formats import FORMATS
from flipper.study.rows import COLUMNS

OPTIONS = (
    "--from --synthetic --formats --content --ranks --parallel --mode --fsync --repeat --mtbf --folder --data-dir "
    "--device --timeout --seed --report --list --format -q --quiet -v --verbose --traceback"
)
"""Renaming one of these breaks scripts."""

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["study", "checkpoint", *map(str, arguments)])
    return (int(ended.value.code or 0), *capsys.readouterr())


def test_the_options_are_those_that_were_decided() -> None:
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert sorted(word for option in options for word in option.opts) == sorted(OPTIONS.split())
    assert all(option.help for option in options)
    assert command.short_help == COMMANDS["checkpoint"]


def test_a_recipe_is_measured_restarted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of the help, shorter, with a page."""
    arguments = ["digits-mlp", "--formats", "pytorch,safetensors", "--repeat", "2", "--seed", "1", "--mtbf", "6h"]
    code, out, err = run(capsys, *arguments, "--report", tmp_path / "page.html", "--folder", tmp_path)
    assert (code, err) == (0, f"wrote {tmp_path / 'page.html'}\n")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [tuple(row) for row in rows] == [COLUMNS, COLUMNS]
    for row, name in zip(rows, ("pytorch", "safetensors"), strict=True):
        assert (row["format"], row["content"], row["layout"], row["ranks"]) == (name, "all", "one file", 1)
        assert (row["mode"], row["fsync"], row["deterministic"], row["missing"]) == ("sync", False, True, [])
        assert row["repeats"] == 2
        assert 0 < row["save_seconds_low"] <= row["save_seconds"] <= row["save_seconds_high"]
        assert row["interval_seconds"] == pytest.approx((2 * row["stall_seconds"] * 21600) ** 0.5)
    assert "digits-mlp" in (tmp_path / "page.html").read_text("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_checkpoint_is_measured_with_and_without_fsync(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--from", SAMPLES / "digits-cnn.h5", "--formats", "npz,dcp", "--mode", "sync,async", "--repeat", "1"]
    code, out, err = run(capsys, *arguments, "--fsync", "no,yes", "--content", "optimizer", "--format", "csv")
    assert (code, err) == (0, "note: npz: no rows with --mode async, which dcp alone has\n")
    rows = list(csv.DictReader(io.StringIO(out)))
    kinds = [("npz", "sync"), ("npz", "sync"), ("dcp", "sync"), ("dcp", "sync"), ("dcp", "async"), ("dcp", "async")]
    assert [(row["format"], row["mode"]) for row in rows] == kinds
    assert [row["fsync"] for row in rows] == ["false", "true"] * 3
    assert {row["deterministic"] for row in rows} == {""}


def test_the_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--list")
    assert (code, [json.loads(line)["name"] for line in out.splitlines()]) == (0, list(FORMATS))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "say what to save: a RECIPE, --from CKPT or --synthetic SIZE"),
        (["digits-mlp", "--synthetic", "1MB"], 2, "one of them"),
        (["nope"], 2, "no recipe named 'nope'"),
        (["digits-mlp", "--formats", "zip"], 2, "known are pytorch, safetensors"),
        (["digits-mlp", "--ranks", "two"], 2, "say numbers, as 1,2,4"),
        (["digits-mlp", "--ranks", "0"], 2, "numbers of at least 1"),
        (["digits-mlp", "--mode", "async", "--formats", "npz"], 2, "none is saved asynchronously; dcp is"),
        (["digits-mlp", "--content", "some"], 2, "known are parameters, model, optimizer, all"),
        (["digits-mlp", "--parallel", "mpi"], 2, "known are ddp, hooks, fsdp"),
        (["digits-mlp", "--mtbf", "0"], 2, "no duration above 0"),
        (["digits-mlp", "--folder", "/nowhere"], 2, "there is no such folder"),
        (["digits-mlp", "--report", "/nowhere/page.html"], 1, "there is no such folder"),
        (["--synthetic", "much"], 2, "say 100MB, 1GiB"),
        (["--synthetic", "8TB"], 2, "take 48,000,000,000,000 bytes of memory"),
        (["--synthetic", "4TB", "--parallel", "ddp", "--ranks", "1,2"], 2, "take 48,000,000,000,000 bytes of memory"),
        (["--from", str(SAMPLES / "README.md")], 4, "no checkpoint that flipper knows"),
        (["digits-mlp", "--ranks", "9", "--parallel", "pipeline", "--formats", "npz"], 2, "at most 3 stages"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    seen = run(capsys, *arguments, "-q", "--seed", "1")
    assert seen[:2] == (code, "")
    assert seen[2].startswith("flipper: error: ")
    assert said in seen[2]
    assert seen[2].count("\n") == 1
