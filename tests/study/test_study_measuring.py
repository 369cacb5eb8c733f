"""Measuring: memory at its highest, files out of the page cache, rows that say what was measured."""

from __future__ import annotations

import functools
import math
import os
import statistics
import tempfile
from pathlib import Path

import pytest
from study_bodies import peak_of_a_save, with_small_files

from flipper.errors import OutputError, UsageError
from flipper.study import memory
from flipper.study.checkpoint import study
from flipper.study.rows import COLUMNS, Measured
from flipper.study.spec import Combination, StudySpec, bytes_of
from flipper.training.launch import run_ranks
from flipper.training.spec import Event

PART = 30_000_000


def test_a_peak_is_what_was_taken_meanwhile() -> None:
    memory.settle()
    before = memory.begin_peak()
    if before is None:
        pytest.skip("this system does not tell")
    taken = b"x" * PART
    del taken
    peak = memory.peak_since(before)
    assert peak is not None
    assert 0.9 * PART < peak < 2 * PART
    before = memory.begin_peak()
    peak = memory.peak_since(before)
    assert peak is not None
    assert peak < 0.5 * PART


def test_saving_in_the_background_takes_a_copy_of_the_state(tmp_path: Path) -> None:
    events: list[Event] = []
    run_ranks(functools.partial(peak_of_a_save, tmp_path), 1, events.append)
    peaks = {event["mode"]: event["values"]["peak_bytes"] for event in events}
    assert peaks["sync"] < 0.5 * PART
    assert 0.9 * PART < peaks["async"] < 2.5 * PART
    for event in events:
        assert PART < event["values"]["bytes"] < 1.01 * PART
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_put_out_of_the_cache_is_not_there(tmp_path: Path) -> None:
    """On a disk; a file system in memory keeps it, and that is told."""
    file = tmp_path / "file"
    file.write_bytes(bytes(10 * memory.PAGE + 1))
    assert memory.resident_pages(file) == 11
    with file.open("r+b") as opened:
        os.fsync(opened.fileno())
    gone = memory.evict(file)
    assert memory.resident_pages(file) == (0 if gone else 11)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        kept = Path(folder, "file")
        kept.write_bytes(bytes(5 * memory.PAGE))
        assert not memory.evict(kept)


def test_a_row_has_the_median_the_least_and_the_most_and_what_follows_from_them() -> None:
    measured = Measured(step_seconds=0.5, batches=20)
    values = [(0.4, 7, 1.0), (0.1, 9, None), (0.2, 8, 3.0), (0.3, 6, 2.0)]
    measured.samples[3] = [
        {"save_seconds": save, "load_seconds": 2 * save, "cold_load_seconds": cold, "stall_seconds": save / 2,
         "peak_bytes": peak, "bytes": 1000.0} for save, peak, cold in values
    ]  # fmt: skip
    combination = Combination("npz", "model", 2, "sync", True)
    row = measured.row(3, combination, 3600.0)
    assert tuple(row) == COLUMNS
    assert (row["save_seconds"], row["save_seconds_low"], row["save_seconds_high"]) == (0.25, 0.1, 0.4)
    assert (row["peak_bytes"], row["peak_bytes_low"], row["peak_bytes_high"]) == (7, 6, 9)
    assert (row["cold_load_seconds"], row["cold_load_seconds_high"]) == (None, None)
    assert row["epoch_share"] == pytest.approx(0.125 / 10)
    assert row["interval_seconds"] == pytest.approx(math.sqrt(2 * 0.125 * 3600))
    assert (row["deterministic"], row["missing"], row["repeats"]) == (None, None, 4)
    assert statistics.median([0.05, 0.1, 0.15, 0.2]) == row["stall_seconds"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("100MB", 10**8), ("1GiB", 2**30), ("1.5 kB", 1500), ("2k", 2000), ("3Mi", 3 * 2**20), ("1tib", 2**40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert bytes_of(text, "--synthetic") == size


@pytest.mark.parametrize("text", ["", "3", "MB", "-1MB", "1XB", "1e3", "1PB", "99TiB", "nan", "1 M i"])
def test_no_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no size of at least 4 bytes"):
        bytes_of(text, "--synthetic")


def test_made_up_parameters_have_the_bytes_that_were_asked_for_and_adam_twice_as_many() -> None:
    spec = StudySpec(synthetic=5_000_000, contents=("model", "optimizer"), formats=("safetensors",), repeat=1)
    found = study(spec)
    model, optimizer = (row["bytes"] for row in found.rows)
    assert 0 <= model - 5_000_000 < 2000
    assert 0 <= optimizer - 15_000_000 < 4000
    assert [row["deterministic"] for row in found.rows] == [None, None]


def test_a_study_leaves_nothing_behind(tmp_path: Path) -> None:
    study(StudySpec(synthetic=40_000, formats=("npz", "dcp"), repeat=1, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pytorch", "safetensors", "npz", "hdf5", "hdf5-gzip", "dcp", "safetensors-sharded"])
def test_what_can_not_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    spec = StudySpec(synthetic=1_000_000, formats=(name,), contents=("model",), repeat=1)
    said = rf": {name} can't be written there: .*(File too large.*|the system took less than was written)$"
    with pytest.raises(OutputError, match=said) as caught:
        run_ranks(functools.partial(with_small_files, spec, 400_000, tmp_path), 1, lambda event: None)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
