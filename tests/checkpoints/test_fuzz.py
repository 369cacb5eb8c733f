"""A few thousand cases of scripts/fuzz in every run of the tests; by hand it runs hundreds of thousands."""

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent.parent.parent / "scripts" / "fuzzing" / "main.py"
FORMATS = 6


def test_damaged_files_of_every_format_bring_out_flippers_own_errors_only(tmp_path: Path) -> None:
    command = [sys.executable, FUZZ, "--cases", "400", "--seed", "11", "--keep", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    struck = [int(line.split(" s, ")[1].split(" still")[0].replace(",", "")) for line in result.stdout.splitlines()]
    assert len(struck) == FORMATS
    assert min(struck) > 20  # damage that is no damage lets a case go all the way, so it isn't only refusals
