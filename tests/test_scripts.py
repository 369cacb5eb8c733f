"""The example scripts work from a user's own folder; they need the .venv that every script sets up."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CNN = ROOT / "sample_checkpoints" / "digits-cnn.pt"

pytestmark = pytest.mark.skipif(
    not any((ROOT / ".venv").glob("installed-*")), reason="no .venv that the scripts made; they would make one now"
)


def script(name: str, *arguments: str, folder: Path, **settings: str) -> str:
    """What the script prints when it is called in `folder`."""
    done = subprocess.run(
        [ROOT / "scripts" / name, *arguments], cwd=folder, env={**os.environ, **settings}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fixtures_are_the_same_bytes_at_every_run(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_bytes(CNN.read_bytes())
    made = script("make_fixtures", "mine.pt", "fixtures", folder=tmp_path).split()
    first = {path.name: path.read_bytes() for path in (tmp_path / "fixtures").iterdir()}
    assert len(first) == 2 * len(made) == 12
    script("make_fixtures", "mine.pt", "fixtures", folder=tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "fixtures").iterdir()} == first


def test_a_sweep_prints_one_line_a_trial(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_bytes(CNN.read_bytes())
    few = {"FIELDS": "exponent", "COUNTS": "1", "SEEDS": "1", "EPOCHS": "2"}
    (line,) = script("sweep_bit_fields", "mine.pt", "digits-cnn", "single", folder=tmp_path, **few).splitlines()
    trial = json.loads(line)
    assert (trial["bits"], trial["count"], trial["seed"], trial["layout"]) == ("exponent", 1, 1, "single")
    assert 0 <= trial["accuracy"] <= 1
