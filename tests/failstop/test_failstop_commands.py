"""`flipper train --kill` and `flipper simulate` as users type them: records, and what is wrong in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = ("train", "digits-mlp", "--parallel", "ddp:3", "--steps", "8", "--seed", "1")
SIMULATE = ("simulate", "digits-mlp", "--workers", "4", "--steps", "8", "--seed", "1")


def flipper(folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-m", "flipper", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_the_record_and_the_metrics_tell_of_the_death(tmp_path: Path) -> None:
    code, out, err = flipper(
        tmp_path, *TRAIN, "--recovery", "lossy", "--kill", "rank:1@step:5:bucket:2", "--metrics", "m.jsonl"
    )
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert (record["recovery"], record["world_size"], record["steps"]) == ("lossy", 2, 8)
    (lost,) = record["lost"]
    assert (lost["rank"], lost["step"]) == (1, 5)
    events = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] in ("rank-lost", "recovered")]
    assert told[0] == {"event": "rank-lost", "rank": 1, "step": 5, "seconds_to_detect": lost["seconds_to_detect"]}
    assert {key: told[1][key] for key in ("event", "strategy", "world_size")} == {
        "event": "recovered", "strategy": "lossy", "world_size": 2
    }  # fmt: skip
    assert told[1]["seconds"] > 0


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    ((*TRAIN, "--kill", "rank:1@step:5"), 2, "say by --recovery what is done when a rank dies"),
    ((*TRAIN, "--kill", "1@5", "--recovery", "lossy"), 2, "say who and when"),
    ((*TRAIN, "--kill", "rank:3@step:5", "--recovery", "lossy"), 2, "the layout has ranks 0 to 2"),
    ((*TRAIN, "--kill", "rank:1@step:5:bucket:3", "--recovery", "lossy"), 2, "the model has 3 buckets, 0 to 2"),
    ((*TRAIN, "--kill", "rank:1@step:9", "--recovery", "lossy"), 2, "this run has the steps 1 to 8"),
    ((*TRAIN, "--recovery", "restart"), 2, "give --save DIR and --save-every N"),
    ((*TRAIN, "--recovery", "lossy", "--control"), 2, "in runs in which nobody dies: leave it out"),
    ((*TRAIN, "--recovery", "lossy", "--min-ranks", "3", "--kill", "rank:0@step:2"), 1, "2 of 3 ranks are left"),
    ((*TRAIN, "--parallel", "fsdp:2", "--recovery", "lossy"), 2, "works under ddp:N and mpi:N, not under fsdp:2"),
    ((*SIMULATE,), 2, "give --mtbf DURATION, to draw failures, or --trace FILE"),
    ((*SIMULATE, "--mtbf", "1s"), 2, "--calibrate measures it here, --costs FILE gives it"),
    ((*SIMULATE, "--mtbf", "soon", "--costs", "c.toml"), 2, "is no duration above 0"),
    ((*SIMULATE, "--mtbf", "1s", "--costs", "c.toml", "--recovery", "pray"), 2, "'pray' is none of restart, rollback"),
    ((*SIMULATE, "--mtbf", "1s", "--costs", "c.toml", "--shape", "0"), 2, "the Weibull shape must be 0.01 or more"),
    ((*SIMULATE, "--mtbf", "1s", "--costs", "c.toml", "--shape", "0.001"), 2, "the Weibull shape must be 0.01 or more"),
    ((*SIMULATE, "--trace", "latin.csv", "--costs", "c.toml"), 2, "is no text in UTF-8: byte 7 can't be read"),
    ((*SIMULATE, "--mtbf", "1s", "--costs", "latin.csv"), 2, "--costs latin.csv is no text in UTF-8"),
    ((*SIMULATE, "--mtbf", "1s", "--costs", "c.toml", "--min-ranks", "5"), 2, "--min-ranks 5: there are 4 workers"),
    ((*SIMULATE, "--mtbf", "1s", "--costs", "absent.toml"), 2, "absent.toml"),
    ((*SIMULATE, "--trace", "t.csv", "--costs", "c.toml"), 2, "line 2: seconds must be"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_what_is_wrong_is_one_line(arguments: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("step = 1\n")
    (tmp_path / "t.csv").write_text("seconds,worker\n1,9\n")
    (tmp_path / "latin.csv").write_bytes(b"seconds\xe9\n")
    seen, out, err = flipper(tmp_path, *arguments)
    assert (seen, out) == (code, "")
    line = err.removesuffix("\n")
    assert said in line
    assert "Traceback" not in line
    assert line.count("\n") == 0 or "Try 'flipper" in line


def test_each_strategy_has_a_row(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("step = 1\ndetect = 0.5\nrespawn = 1\nwrite = 0.1\n")
    code, out, err = flipper(tmp_path, *SIMULATE, "--mtbf", "4s", "--costs", "c.toml")
    assert (code, err) == (0, "")
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [row["strategy"] for row in rows] == ["restart", "rollback", "lossy"]
    assert all(row["failures"] > 0 for row in rows)
    assert flipper(tmp_path, *SIMULATE, "--mtbf", "4s", "--costs", "c.toml")[1] == out


def test_what_is_measured_is_printed_as_a_file_of_costs(tmp_path: Path) -> None:
    code, _, err = flipper(tmp_path, *SIMULATE, "--mtbf", "4s", "--calibrate", "--recovery", "lossy")
    assert code == 0
    (tmp_path / "c.toml").write_text(err)
    assert flipper(tmp_path, *SIMULATE, "--mtbf", "4s", "--costs", "c.toml", "--recovery", "lossy")[0] == 0
    values = dict(line.split(" = ") for line in err.splitlines())
    assert set(values) == {
        "step", "sample", "latency", "bandwidth", "snapshot", "detect", "regroup", "respawn", "write", "read"
    }  # fmt: skip
    assert all(float(value) >= 0 for value in values.values())
    assert float(values["respawn"]) > float(values["regroup"])
