"""`flipper campaign` as users type it: options, help, plans, status, export, errors of one line."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flipper.cli.campaign import COMMANDS, command

COMMON = "-q --quiet -v --verbose --traceback"
OPTIONS = {
    "show": f"--set --no-timing --format {COMMON}",
    "run": f"--out --workers --engine --scheduler --shard --set --keep --audit --format {COMMON}",
    "status": f"--format {COMMON}",
    "trial": f"--cell --trial --keep --full --format {COMMON}",
    "report": f"--format -o --output --figures {COMMON}",
    "export": f"--to -o --output {COMMON}",
    "merge": f"--format {COMMON}",
}
"""Renaming one of these breaks scripts: it is a decision, and this is where it is written down."""

SPEC = """
[campaign]
name = "tiny"
recipe = "digits-mlp"
inject_epoch = 1
epochs = 2
trials = 2
tolerance = 0.02
[axes]
parallel = ["single", "ddp:2"]
bits = ["sign", "exponent"]
count = 1
"""


def flipper(*words: object, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flipper", *map(str, words)], cwd=cwd, capture_output=True, text=True, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a campaign file, and the campaign run."""
    path = tmp_path_factory.mktemp("shell")
    (path / "tiny.toml").write_text(SPEC, "utf-8")
    done = flipper("campaign", "run", "tiny.toml", "--format", "json", cwd=path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["folder"], record["cells"], record["trials"]) == ("tiny", 4, 8)
    assert sum(record["outcomes"].values()) == 8
    assert "trials: 8 of 8" in done.stderr
    return path


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_those_that_were_decided(name: str) -> None:
    found = command.get_command(click.Context(command), name)
    assert found is not None
    options = [option for option in found.params if isinstance(option, click.Option)]
    assert sorted(word for option in options for word in option.opts) == sorted(OPTIONS[name].split())
    assert all(option.help for option in options)
    assert found.get_short_help_str(200) == COMMANDS[name]


def test_every_command_has_its_options_frozen() -> None:
    assert set(OPTIONS) == set(COMMANDS)


def test_show_lists_the_cells_and_runs_nothing_without_timing(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(SPEC, "utf-8")
    done = flipper("campaign", "show", "tiny.toml", "--no-timing", "--set", "axes.count=1,10", "--format", "json",
                   cwd=tmp_path)  # fmt: skip
    plan = json.loads(done.stdout)
    assert (plan["cells"], plan["trials"], plan["golden_and_control_runs"], plan["null_trials"]) == (8, 16, 4, 0)
    assert [(row["parallel"], row["bits"], row["count"]) for row in plan["plan"][:3]] == [
        ("single", "sign", 1), ("single", "sign", 10), ("single", "exponent", 1),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def test_status_tells_done_and_planned(folder: Path) -> None:
    by_folder, by_spec = (flipper("campaign", "status", where, cwd=folder) for where in ("tiny", "tiny.toml"))
    assert by_folder.stdout == by_spec.stdout
    record = json.loads(by_folder.stdout)
    assert (record["trials"], record["planned"], record["running"]) == (8, 8, [])


def test_status_imports_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys; from flipper.campaigns.status import status; from pathlib import Path; status(Path('tiny'));"
        "print([name for name in ('numpy', 'torch', 'scipy', 'h5py', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_export_has_one_row_a_trial_in_every_format(folder: Path) -> None:
    import pyarrow.parquet as parquet

    as_csv = list(csv.DictReader(io.StringIO(flipper("campaign", "export", "tiny", cwd=folder).stdout)))
    lines = flipper("campaign", "export", "tiny", "--to", "jsonl", cwd=folder).stdout.splitlines()
    done = flipper("campaign", "export", "tiny", "--to", "parquet", "-o", "tiny.parquet", cwd=folder)
    assert done.returncode == 0, done.stderr
    as_parquet = parquet.read_table(folder / "tiny.parquet").to_pylist()
    as_json = [json.loads(line) for line in lines]
    assert len(as_csv) == len(as_json) == len(as_parquet) == 8
    for one, two, three in zip(as_csv, as_json, as_parquet, strict=True):
        assert list(one) == list(two) == list(three)
        assert one["state_digest"] == two["state_digest"] == three["state_digest"]
        assert int(one["seed"]) == two["seed"] == int(three["seed"])
        assert float(one["metric_final"]) == two["metric_final"] == three["metric_final"]


def test_a_trial_alone_is_as_stored(folder: Path) -> None:
    done = flipper("campaign", "trial", "tiny", "--cell", 3, "--trial", 1, cwd=folder)
    record = json.loads(done.stdout)
    assert (record["cell"], record["parallel"], record["bits"], record["as_stored"]) == (3, "ddp:2", "exponent", True)


def test_a_run_that_is_finished_runs_nothing_again(folder: Path) -> None:
    before = flipper("campaign", "export", "tiny", cwd=folder).stdout
    done = flipper("campaign", "run", "tiny", "-q", cwd=folder)
    assert json.loads(done.stdout)["trials"] == 8
    assert flipper("campaign", "export", "tiny", cwd=folder).stdout == before


EMPTY: list[tuple[object, ...]] = [
    ("run", "tiny.toml", "--out", ""), ("run", ""), ("show", ""), ("status", ""), ("export", ""), ("report", ""),
    ("trial", "", "--cell", 0, "--trial", 0), ("merge", ""), ("merge", "tiny", ""), ("report", "tiny", "--figures", ""),
]  # fmt: skip
"""Commands whose folder has a name without a letter."""


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("run", "missing.toml"), 2, "missing.toml can't be read: No such file or directory"),
        (("status", "."), 2, "no campaign.json"),
        (("trial", "tiny", "--cell", 9, "--trial", 0), 2, "no cell 9; this campaign has 0 to 3"),
        (("trial", "tiny", "--cell", 0, "--trial", 2), 2, "cell 0 has trials 0 to 1, not 2"),
        (("run", "tiny.toml", "--set", "seed=4"), 2, "seed = 0, the spec now says 4"),
        (("run", "tiny.toml", "--set", "axes.parallel=dpp:2", "--out", "new"), 2, "no layout 'dpp:2'"),
        (("run", "tiny.toml", "--set", "axes.layer=conv9", "--out", "other"), 2, "--layer 'conv9' matches no tensor"),
        (("run", "tiny.toml", "--shard", "3/2"), 2, "--shard '3/2' is not of the form I/N"),
        (("run", "tiny", "--set", "trials=5"), 2, "--set and --out go with a SPEC"),
        (("export", "tiny", "--to", "parquet"), 2, "--to parquet needs -o FILE"),
        (("run", "tiny.toml", "--set", "recipe=digits", "--out", "o"), 2, "digits"),
        (("rnu", "tiny.toml"), 2, "did you mean run?"),
        *((words, 2, "the name is empty; give a path, which is . for the working folder") for words in EMPTY),
    ],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(
    folder: Path, words: tuple[object, ...], code: int, told: str
) -> None:
    done = flipper("campaign", *words, cwd=folder)
    assert done.returncode == code, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("flipper: error:")]
    assert len(error) == 1
    assert told in error[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
