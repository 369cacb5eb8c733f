"""Data on stdout, the rest on stderr; formats; terminals; readers that go away (INTERFACE section 1)."""

import csv
import io
import json
import os
import shlex
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from cli_tools import CNN, COMMAND, ENVIRONMENT, MLP, ROOT, SAMPLES, flipper, here, on_terminal, rows_of, strict
from safetensors.numpy import save_file

from flipper.cli import COMMANDS
from flipper.cli.output import emit_rows

ESCAPE = "\x1b"

PRINTING = {
    "inspect": ["inspect", MLP],
    "dry run": ["inject", MLP, "--dry-run", "--seed", "1", "--count", "9"],
    "diff": ["diff", MLP, SAMPLES / "digits-mlp.h5"],
    "summary": ["diff", MLP, CNN, "--summary"],
    "verify": ["verify", MLP],
    "size": ["size", "--population", "1000"],
    "recipes": ["train", "--list"],
}


@pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
def test_without_a_terminal_the_format_is_json_lines(arguments):
    plain = here(*arguments)
    assert plain == here(*arguments, "--format", "jsonl")
    for line in plain[1].splitlines():
        assert isinstance(strict(line), dict)
        assert ": " not in line.split('"', 1)[0]


@pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
def test_json_is_one_document_with_the_same_records(arguments):
    code, out, _ = here(*arguments, "--format", "json")
    document = strict(out)
    lines = [strict(line) for line in here(*arguments)[1].splitlines()]
    if isinstance(document, dict) and "tensors" in document and "population" in document:
        document = document["tensors"]
    assert (document if isinstance(document, list) else [document]) == lines
    assert code == here(*arguments)[0]


@pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
def test_csv_has_the_keys_of_json_as_columns(arguments):
    _, out, _ = here(*arguments, "--format", "csv")
    reader = csv.DictReader(io.StringIO(out, newline=""), strict=True)
    table = list(reader)
    lines = [strict(line) for line in here(*arguments)[1].splitlines()]
    assert len(table) == len(lines)
    for row, line in zip(table, lines, strict=True):
        assert set(line) <= set(row)
        for key, value in row.items():
            wanted = line.get(key)
            assert value == as_cell(wanted), key


def as_cell(value):
    if value is None:
        return ""
    if isinstance(value, bool | dict | list):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return str(value)


@pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
@pytest.mark.parametrize("style", ["table", "json", "jsonl", "csv"])
def test_quiet_says_nothing_on_stderr_and_prints_the_same(arguments, style):
    loud, quiet = here(*arguments, "--format", style), here(*arguments, "--format", style, "-q")
    assert quiet == (loud[0], loud[1], "")


def test_numbers_that_are_not_finite_are_strings(tmp_path):
    save_file({"w": np.array([np.nan, np.inf, -np.inf, 1], np.float32)}, tmp_path / "a")
    save_file({"w": np.array([1, 1, 1, 1], np.float32)}, tmp_path / "b")
    for style in ("json", "jsonl"):
        code, out, _ = here("diff", tmp_path / "a", tmp_path / "b", "--format", style)
        rows = strict(out) if style == "json" else [strict(line) for line in out.splitlines()]
        assert (code, [row["before_value"] for row in rows]) == (3, ["NaN", "Infinity", "-Infinity"])
    out = here("diff", tmp_path / "a", tmp_path / "b", "--format", "csv")[1]
    assert [row["before_value"] for row in csv.DictReader(io.StringIO(out))] == ["NaN", "Infinity", "-Infinity"]


def test_on_a_terminal_the_format_is_a_table():
    code, out, err = on_terminal("inspect", MLP)
    lines = out.replace(f"{ESCAPE}[1m", "").replace(f"{ESCAPE}[0m", "").splitlines()
    assert code == 0
    assert lines[0].split()[:5] == ["name", "aliases", "layer", "role", "dtype"]
    assert lines[1].startswith("model.fc1.bias ")
    assert err.startswith("population: ")


def lines_on(columns, *arguments):
    """What a table of that many columns' terminal shows; the terminal itself says how wide it is."""
    line = shlex.join([*COMMAND, *map(str, arguments)])
    _, out, _ = on_terminal(command=["sh", "-c", f"stty cols {columns} <&1; {line}"])
    return out.replace(f"{ESCAPE}[1m", "").replace(f"{ESCAPE}[0m", "").splitlines()


WIDE = [PRINTING["inspect"], ["inspect", CNN, "--stats"], PRINTING["dry run"], PRINTING["diff"], ["diff", MLP, CNN]]


@pytest.mark.parametrize("arguments", WIDE)
@pytest.mark.parametrize("columns", [80, 100, 132])
def test_tables_fit_the_terminal(arguments, columns):
    lines = lines_on(columns, *arguments)
    numbers = 92 if "--stats" in arguments else 0  # which are never cut
    assert max(map(len, lines)) <= max(columns, numbers)
    whole = here(*arguments, "--format", "table")[1].splitlines()
    assert len(lines) == len(whole)
    header = lines[0].split()
    assert header == [name for name in whole[0].split() if name in header]
    assert header[0] in ("name", "tensor")


def test_long_names_keep_their_ends_and_important_columns_stay(tmp_path):
    name = "encoder." * 20 + "weight"
    save_file({name: np.ones(3, np.float32)}, tmp_path / "a")
    header, row = lines_on(80, "inspect", tmp_path / "a")
    assert {"name", "role", "dtype", "shape", "storage"} <= set(header.split())
    assert row.startswith("encoder.e")
    assert row.split()[0].endswith("weight")
    save_file({"other": np.ones(3, np.float32)}, tmp_path / "b")
    assert [row.split()[-1] for row in lines_on(80, "diff", tmp_path / "a", tmp_path / "b")] == [
        "kind", "only-in-a", "only-in-b"
    ]  # fmt: skip


def test_only_tables_on_a_terminal_are_cut(tmp_path):
    name = "encoder." * 20 + "weight"
    save_file({name: np.ones(3, np.float32)}, tmp_path / "a")
    for style in ("json", "jsonl", "csv"):
        assert name in on_terminal("inspect", tmp_path / "a", "--format", style, COLUMNS="80")[1]
    assert name in here("inspect", tmp_path / "a", "--format", "table")[1]
    assert name in on_terminal("inspect", tmp_path / "a")[1]  # one that doesn't say how wide it is
    assert name not in on_terminal("inspect", tmp_path / "a", COLUMNS="80")[1]


def test_the_terminal_is_that_of_stdout():
    """A table goes to eyes, not to a pipe whose stderr happens to be a terminal."""
    code, out, err = on_terminal("inspect", MLP, out=False)
    assert code == 0
    assert strict(out.splitlines()[0])["name"] == "model.fc1.bias"
    assert ESCAPE not in out + err


def test_no_color_is_honoured_on_a_terminal():
    assert ESCAPE in on_terminal("inspect", MLP)[1]
    assert ESCAPE not in "".join(on_terminal("inspect", MLP, NO_COLOR="1")[1:])


def test_no_colour_without_a_terminal():
    for style in ("table", "json", "jsonl", "csv"):
        done = flipper("inspect", MLP, "--format", style, FORCE_COLOR="1")
        assert ESCAPE not in done.stdout + done.stderr


def test_control_characters_of_a_name_never_reach_the_terminal(tmp_path):
    save_file({"a\nb\x1b[2J": np.ones(3, np.float32)}, tmp_path / "a")
    for arguments in (["inspect", tmp_path / "a"], ["inspect", tmp_path / "a", "--layer", "zzz"]):
        _, out, err = here(*arguments, "--format", "table")
        assert ESCAPE not in out + err
        assert "a\\nb\\x1b[2J" in out + err
        assert len(err.splitlines()) == 1


def test_names_survive_every_encoding_of_stdout(tmp_path):
    names = ["é\u2028x", "\U0001f600", "plain"]
    save_file({name: np.ones(1, np.float32) for name in names}, tmp_path / "a")
    for encoding in ("utf-8", "ascii", "latin-1"):
        done = flipper("inspect", tmp_path / "a", "--format", "jsonl", PYTHONIOENCODING=encoding)
        assert done.returncode == 0
        assert sorted(strict(line)["name"] for line in done.stdout.split("\n") if line) == sorted(names)


@pytest.mark.parametrize("style", ["table", "json", "jsonl", "csv"])
def test_a_reader_that_goes_away_is_no_error_message(style, tmp_path):
    arguments = ["inject", CNN, "--dry-run", "--seed", "1", "--count", "5000", "--format", style]
    with open(tmp_path / "err", "w+") as errors:
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=errors, env=ENVIRONMENT, cwd=ROOT
        )
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) in (0, 1)
        errors.seek(0)
        assert errors.read() == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout_is_one_line(unbuffered):
    """Also where Python holds what could not be written, and would try once more when it ends."""
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        for arguments in (["inspect", MLP], ["size", "--population", "9"], ["--help"]):
            done = subprocess.run(
                [*COMMAND, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True, env=environment,
                check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (1, "flipper: error: stdout: No space left on device\n")


def test_a_closed_stdout_or_stderr_is_no_internal_error():
    line = " ".join([*COMMAND, "inspect", str(MLP)])
    for closed in (">&-", "2>&-"):
        shell = ["sh", "-c", f"{line} {closed}"]
        done = subprocess.run(shell, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert done.returncode == 0
        assert "error" not in done.stderr


MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[2:], stdout=open("/dev/null", "w"), stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("style", ["table", "json", "jsonl", "csv"])
def test_rows_are_printed_as_they_come(style, monkeypatch):
    """What is held does not grow with their number."""
    rows = ({"number": number, "text": "x" * 1000} for number in range(5000))
    with open(os.devnull, "w", encoding="utf-8") as sink:
        monkeypatch.setattr(sys, "stdout", sink)
        tracemalloc.start()
        emit_rows(rows, style, ("number", "text"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1_000_000


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """40,000 rows collected would be some 60 MB; streamed they add next to nothing."""
    one = np.zeros(40_000, np.float16)
    save_file({"w": one}, tmp_path / "a")
    save_file({"w": one + 1}, tmp_path / "b")
    peaks = []
    for pair in ("aa", "ab"):
        command = [*COMMAND, "diff", *(str(tmp_path / name) for name in pair), "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, "-", *command], capture_output=True, text=True, env=ENVIRONMENT, check=True
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 20


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("campaign", "study")])  # groups
def test_every_command_has_quiet_verbose_and_traceback(command):
    out = here(command, "--help")[1]
    for option in ("-q, --quiet", "-v, --verbose", "--traceback"):
        assert option in out
    assert ("--format" in out) == (command != "completion")


def test_verbose_says_what_was_opened():
    assert f"{MLP}: pytorch, 18 tensors, {os.path.getsize(MLP):,} bytes" in here("inspect", MLP, "-v")[2]


def test_rows_of_a_loop_can_be_appended_to_a_log(tmp_path):
    with open(tmp_path / "log.jsonl", "a") as log:
        for seed in range(3):
            log.write(here("inject", MLP, "-o", tmp_path / f"{seed}", "--seed", seed)[1])
    assert [strict(line)["seed"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_keys_are_snake_case():
    for row in rows_of("inspect", MLP, "--stats") + rows_of("inject", MLP, "--dry-run", "--seed", "1"):
        assert all(key == key.lower() and key.isidentifier() for key in row)
