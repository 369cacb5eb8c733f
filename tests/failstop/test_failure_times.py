"""When workers fail: distributions against their own formulas, traces line by line."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from scipy import stats

from flipper.errors import UsageError
from flipper.failstop.costs import Costs
from flipper.failstop.failures import Drawn, Failure, Trace, seconds_of


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.5])
def test_lives_follow_the_weibull_distribution_of_the_jobs_mtbf(shape: float) -> None:
    drawn = Drawn(mtbf=10.0, workers=500, seed=7, shape=shape)
    lives = [next(drawn.of(worker)) for worker in range(500)]
    scale = 10.0 * 500 / math.gamma(1 + 1 / shape)
    assert stats.kstest(lives, stats.weibull_min(shape, scale=scale).cdf).pvalue > 1e-3


def test_a_worker_that_is_replaced_fails_again_after_another_life() -> None:
    times = list(itertools.islice(Drawn(1.0, 1, seed=3).of(0), 2000))
    lives = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert stats.kstest(lives, stats.expon().cdf).pvalue > 1e-3


def test_the_job_fails_as_often_as_its_mtbf_says() -> None:
    drawn = Drawn(2.0, 50, seed=5)
    count = sum(sum(1 for _ in itertools.takewhile(lambda t: t < 2000.0, drawn.of(worker))) for worker in range(50))
    assert abs(count - 1000) < 4 * math.sqrt(1000)  # Poisson


def test_draws_depend_on_seed_and_worker_and_stay_for_ever() -> None:
    first = [next(Drawn(1.0, 2, seed=1).of(worker)) for worker in range(2)]
    assert first == [0.7235703416028869, 0.15624992282439515]
    assert next(Drawn(1.0, 2, seed=2).of(0)) != first[0]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("250ms", 0.25), ("15min", 900), ("2h", 7200),
                                               ("1.5d", 129600), ("3m", 180), ("1e3 s", 1000)])  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text, "--mtbf") == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "2 weeks", "h", "inf", "nan", "1e400"])
def test_what_is_no_duration_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"--mtbf .* is no duration above 0: say 90s"):
        seconds_of(text, "--mtbf")


def test_a_trace_is_read_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("worker,seconds,why\n1,7.5,disk\n0,2,psu\n1,3,net\n")
    trace = Trace.read(tmp_path / "t.csv", 2)
    assert trace.failures == (Failure(2.0, 0), Failure(3.0, 1), Failure(7.5, 1))
    assert list(trace.of(1)) == [3.0, 7.5]


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As spreadsheets write it."""
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfseconds,worker\r\n2,1\r\n")
    assert Trace.read(tmp_path / "t.csv", 2).failures == (Failure(2.0, 1),)


def test_no_cost_may_be_endless_but_bandwidth(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(Costs(step=1.0).text())
    assert Costs.load(tmp_path / "c.toml") == Costs(step=1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it needs a first line with the columns seconds,worker"),
        ("time,rank\n1,2\n", "it needs a first line"),
        ("seconds,worker\n1,0\n2,2\n", "line 3: .* worker 0 to 1"),
        ("seconds,worker\n-1,0\n", "line 2: seconds must be"),
        ("seconds,worker\nnan,0\n", "line 2"),
        ("seconds,worker\n1\n", "line 2"),
    ],
)
def test_what_is_wrong_in_a_trace_is_told(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=said):
        Trace.read(tmp_path / "t.csv", 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed = 3\n", "no cost 'speed'; known: step, sample"),
        ("step = -1\n", "step must be a number of at least 0, not -1"),
        ("step = nan\n", "step must be a number"),
        ('step = "1"\n', "step must be a number of at least 0, not '1'"),
        ("step = true\n", "step must be a number"),
        ("bandwidth = 0\n", "bandwidth must be above 0"),
        ("bandwidth = 1e-300\n", "bandwidth is 1e-300; at least 1e-12 bytes a second"),
        ("step = inf\n", "step is inf; at most 1e\\+12 seconds"),
        (f"read = 1{'0' * 400}\n", "read is 1000.*0; at most 1e\\+12 seconds"),
        ("step = \n", "no TOML"),
    ],
)
def test_what_is_wrong_in_costs_is_told(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        Costs.load(tmp_path / "c.toml")


def test_an_allreduce_takes_what_halving_and_doubling_takes() -> None:
    costs = Costs(latency=0.5, bandwidth=100.0)
    assert costs.allreduce(800, 4) == pytest.approx(2 * 2 * 0.5 + 2 * (4 + 2))  # 400 and 200 bytes, there and back
    assert costs.allreduce(800, 5) == pytest.approx(2 * 3 * 0.5 + 2 * 0.8 * 8)
    assert costs.allreduce(800, 1) == 0


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before() -> None:
    costs = Costs(step=1.0, sample=0.5, latency=0.25)
    assert costs.bucket_ends(4, [100, 100], 2) == pytest.approx([1 + 1 + 0.5, 3 + 0.5])
    slow = Costs(step=3.0, latency=1.0)
    assert slow.bucket_ends(1, [100, 100, 100], 2) == pytest.approx([1 + 2 / 3 + 2, 5 + 2 / 3, 7 + 2 / 3])
