"""Sweeps over failure rates: points against single simulations, break-evens against lines drawn by hand."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from flipper.errors import UsageError
from flipper.failstop.break_even import Difference, break_evens
from flipper.failstop.costs import Costs
from flipper.failstop.failures import Drawn, Trace
from flipper.failstop.simulate import SimulationSpec, simulate
from flipper.failstop.sweep import Sweep, sweep
from flipper.training.spec import TrainSpec

COSTS = Costs(step=0.2, sample=0.01, detect=1, regroup=0.5, respawn=4, write=0.5, read=0.5, snapshot=0.01)
MTBFS = (4.0, 16.0, 64.0)
STRATEGIES = ("restart", "rollback", "lossy")


def spec_of() -> SimulationSpec:
    train = TrainSpec("digits-mlp", steps=30, seed=5)
    return SimulationSpec(train, 4, STRATEGIES, Trace(()), COSTS, mtbf=MTBFS[0])


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep(spec_of(), MTBFS, 2, 5)


def test_a_point_is_what_single_simulations_come_to(swept: Sweep) -> None:
    assert swept.seeds == (5, 6)
    for mtbf in (4.0, 16.0):
        singles = []
        for seed in (5, 6):
            spec = SimulationSpec(
                TrainSpec("digits-mlp", steps=30, seed=seed), 4, STRATEGIES, Drawn(mtbf, 4, seed), COSTS, mtbf=mtbf
            )
            singles.append({str(row["strategy"]): row for row in simulate(spec)})
        for strategy in STRATEGIES:
            (point,) = [each for each in swept.of(strategy) if each.mtbf == mtbf]
            assert list(point.records) == [single[strategy] for single in singles]
            for timed, single in zip(point.times[:2], point.records, strict=True):
                for name in ("failures", "overhead_fraction", "compute_seconds", "world_size_end", "error"):
                    assert timed[name] == single[name]


def test_rows_have_means_and_students_intervals(swept: Sweep) -> None:
    rows = swept.rows()
    points = [row for row in rows if row["kind"] == "point"]
    assert [(row["mtbf_seconds"], row["strategy"]) for row in points] == [(m, s) for m in MTBFS for s in STRATEGIES]
    (row,) = [row for row in points if (row["mtbf_seconds"], row["strategy"]) == (16.0, "restart")]
    (point,) = [each for each in swept.of("restart") if each.mtbf == 16.0]
    overheads = [each["overhead_fraction"] for each in point.times]
    assert row["overhead_fraction"] == pytest.approx(statistics.fmean(overheads))
    half = 2.776445105 * statistics.stdev(overheads) / math.sqrt(5)  # the 0.975 quantile with four degrees of freedom
    assert row["overhead_fraction_high"] == pytest.approx(statistics.fmean(overheads) + half)
    assert (row["failures_per_hour"], row["draws"], row["runs"], row["accuracy_loss"]) == (225.0, 5, 2, 0.0)
    pairs = {(row["strategy"], row["against"], row["quantity"]) for row in rows if row["kind"] == "break-even"}
    assert pairs == {
        (one, other, quantity)
        for one, other in (("rollback", "restart"), ("lossy", "restart"), ("rollback", "lossy"))
        for quantity in ("overhead_fraction", "accuracy_loss")
    }


def difference(rows: list[list[float]], mtbfs: tuple[float, ...] = (1.0, 10.0, 100.0)) -> Difference:
    return Difference("lossy", "restart", "overhead_fraction", mtbfs, rows)


def test_a_break_even_lies_on_the_line_between_two_rates() -> None:
    """From 1 down to -3 between 10 and 100 s it is 0 after a quarter of a decade."""
    (found,) = break_evens(difference([[2.0], [1.0], [-3.0]]))
    assert found.mtbf == pytest.approx(10 * 10**0.25)
    assert (found.low, found.high) == (None, None)
    assert found.verdict == "restart has less at shorter MTBFs, lossy at longer ones"


def test_its_interval_is_that_of_its_seeds() -> None:
    """Each seed by itself crosses after 1/4, 1/2 or 3/4 of the decade, and so do means of resamples, between them."""
    rows = [[2.0, 2.0, 2.0], [1.0, 2.0, 3.0], [-3.0, -2.0, -1.0]]
    (found,) = break_evens(difference(rows))
    assert found.mtbf == pytest.approx(10**1.5)
    assert found.low is not None
    assert found.high is not None
    assert 10**1.25 - 1e-9 <= found.low < 10**1.5 < found.high <= 10**1.75 + 1e-9
    assert break_evens(difference(rows)) == [found]


def test_an_interval_may_reach_beyond_the_sweep() -> None:
    rows = [[2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [-3.0, -1.0, 3.5]]
    (found,) = break_evens(difference(rows))
    assert found.mtbf is not None
    assert found.low is not None
    assert found.high is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], "no difference at any MTBF of the sweep"),
        (
            [[-1.0, -1.1], [-1.0, -1.2], [-0.1, -0.6]],
            "no break-even: lossy has no more than restart at every MTBF of the sweep (told apart at 1 of 3)",
        ),
        ([[1.0, -0.5], [2.0, -0.1], [0.3, -0.1]], "no break-even: not told apart at any MTBF of the sweep"),
        ([[1.0], [2.0], [0.0]], "no break-even: restart has no more than lossy at every MTBF of the sweep "
                                "(by one seed only)"),
        ([[math.nan], [math.nan], [math.nan]], "not known: at no MTBF of the sweep have both come to their end"),
        ([[math.nan], [0.0], [math.nan]], "no difference at any MTBF of the sweep"),
    ],
)  # fmt: skip
def test_without_a_crossing_it_is_said_how_it_is(rows: list[list[float]], said: str) -> None:
    (found,) = break_evens(difference(rows))
    assert (found.mtbf, found.low, found.high, found.verdict) == (None, None, None, said)


def test_of_a_strategy_that_never_ends_only_the_neighbours_are_known() -> None:
    (found,) = break_evens(difference([[math.inf, 1.0], [-1.0, -2.0], [-1.0, -1.0]]))
    assert (found.mtbf, found.low, found.high) == (None, 1.0, 10.0)


def test_several_crossings_are_told_as_such() -> None:
    found = break_evens(difference([[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]]))
    assert [each.mtbf for each in found] == [pytest.approx(10**0.5), pytest.approx(10**1.5)]
    assert all("one of 2 crossings" in each.verdict for each in found)


def test_a_run_that_gets_nowhere_is_given_up() -> None:
    """A failure every tenth of a second, when it takes five to come back."""
    train = TrainSpec("digits-mlp", steps=10, seed=1)
    spec = SimulationSpec(train, 4, ("restart",), Drawn(0.1, 4, 1), COSTS, mtbf=0.1)
    (row,) = simulate(spec)
    assert row["accuracy_loss"] is None
    assert str(row["error"]).startswith("failures come too fast: after ")


@pytest.mark.parametrize(("mtbf", "shape"), [(1e-9, 1.0), (1.0, 0.02)])
def test_failures_that_let_no_time_pass_are_given_up_too(mtbf: float, shape: float) -> None:
    train = TrainSpec("digits-mlp", steps=10, seed=1)
    spec = SimulationSpec(train, 4, ("restart", "lossy"), Drawn(mtbf, 4, 1, shape), COSTS, mtbf=mtbf)
    restart, lossy = simulate(spec)
    assert str(restart["error"]).startswith("failures come too fast: after ")
    assert lossy["error"] == "fewer than 1 of 4 workers are left"
    for row in (restart, lossy):  # less time than the steps would have taken, and no overhead for that
        assert (row["overhead_seconds"], row["overhead_fraction"]) == (None, None)


def test_one_rate_is_no_sweep() -> None:
    with pytest.raises(UsageError, match="--sweep-mtbf needs two durations or more"):
        sweep(spec_of(), [3.0, 3.0], 1, 1)


SIMULATE = ("simulate", "digits-mlp", "--workers", "4", "--steps", "8", "--seed", "1", "--costs", "c.toml")


def flipper(folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-m", "flipper", *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_the_command_prints_rows_and_writes_the_page(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("step = 1\ndetect = 0.5\nrespawn = 1\nwrite = 0.1\n")
    code, out, err = flipper(tmp_path, *SIMULATE, "--sweep-mtbf", "3s,1min", "--repeat", "2", "--draws", "3",
                             "--report", "page.html")  # fmt: skip
    assert (code, err) == (0, "wrote page.html\n")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["kind"] for row in rows].count("point") == 6
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    for row in rows:
        if row["kind"] == "break-even":
            assert row["verdict"] in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--sweep-mtbf", "3s,4s", "--mtbf", "3s"), 2, "takes the place of --mtbf and --trace"),
        (("--sweep-mtbf", "3s"), 2, "needs two durations or more"),
        (("--sweep-mtbf", "3s,soon"), 2, "is no duration above 0"),
        (("--mtbf", "3s", "--report", "page.html"), 2, "give --sweep-mtbf"),
        (("--mtbf", "3s", "--repeat", "3"), 2, "give --sweep-mtbf"),
        (("--sweep-mtbf", "3s,4s", "--report", "absent/page.html"), 1, "there is no folder absent"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_one_line(
    arguments: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("step = 1\n")
    seen, out, err = flipper(tmp_path, *SIMULATE, *arguments)
    assert (seen, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "page.html").exists()
