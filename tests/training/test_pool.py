"""The pool: slots are ranks, jobs start in order, one that dies or hangs fails alone, and nothing is left of any."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import pytest
import rank_bodies
from processes import children, wait_until
from series import spec

from flipper.errors import TrainingError, UsageError
from flipper.training.launch import run_ranks
from flipper.training.pool import Pool
from flipper.training.ranks import Body
from flipper.training.run import TrainResult, train
from flipper.training.spec import Event, TrainSpec


@pytest.fixture(autouse=True)
def left_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """After each test: no process below the fork server, no folder, no shared memory of the pids noted here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids: list[int] = []
    yield pids
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert server is None or wait_until(lambda: not children(server), 10)
    assert list(tmp_path.glob("flipper-*")) == []
    assert [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)] == []
    assert wait_until(lambda: not any(thread.name == "flipper-job" for thread in threading.enumerate()), 10)


@dataclass
class Log:
    """What was started and ended, in order, by the jobs' threads."""

    entries: list[tuple[str, int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def train(self, number: int, spec: TrainSpec) -> TrainResult:
        with self.lock:
            self.entries.append(("start", number, spec.parallel.ranks))
        try:
            return train(spec)
        finally:
            with self.lock:
                self.entries.append(("end", number, -spec.parallel.ranks))


def run(body: Body, ranks: int, pids: list[int], timeout: float = 60, limit: float | None = None) -> None:
    def hear(event: Event) -> None:
        pids.append(event["pid"])

    run_ranks(body, ranks, hear, timeout=timeout, limit=limit)


def test_slots_are_ranks_jobs_start_in_order_and_results_are_those_of_runs_alone() -> None:
    log = Log()
    layouts = ["single", "ddp:2", "single", "single", "pipeline:2", "ddp:3", "single", "hooks:2"]
    with Pool(3) as pool:
        specs = [spec("digits-mlp", layout, steps=2) for layout in layouts]
        futures = [pool.submit_ranks(each.parallel.ranks, log.train, n, each) for n, each in enumerate(specs)]
        results = [future.result() for future in futures]
    busy = 0
    for _, _, change in log.entries:
        busy += change
        assert 0 <= busy <= 3
    assert busy == 0
    assert [number for kind, number, _ in log.entries if kind == "start"] == list(range(8))
    alone = {layout: train(spec("digits-mlp", layout, steps=2)) for layout in set(layouts)}
    for layout, result in zip(layouts, results, strict=True):
        assert result.state_digest == alone[layout].state_digest
        assert result.resume_digest == alone[layout].resume_digest


def test_as_many_jobs_run_at_once_as_fit() -> None:
    """Two that wait for each other, which fit, end; a third waits for a place."""
    both = threading.Barrier(2, timeout=60)
    with Pool(4) as pool:
        pair = [pool.submit_ranks(2, both.wait) for _ in range(2)]
        assert {future.result() for future in pair} == {0, 1}
        gate = threading.Event()
        held = pool.submit_ranks(3, gate.wait, 60)
        large = pool.submit_ranks(2, threading.get_ident)
        small = pool.submit(threading.get_ident)  # would fit, and waits behind the larger one
        assert not wait([large, small], timeout=0.2).done
        gate.set()
        assert held.result()
        assert wait([large, small], timeout=60).not_done == set()


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (rank_bodies.kill_rank_1, {}, r"^rank 1 of 2 died \(killed by SIGKILL\)"),
        (rank_bodies.stop_rank_1, {"timeout": 1.0}, r"^rank 1 of 2 is stopped"),
        (rank_bodies.sleep_long, {"limit": 0.5}, r"^the run was ended after its limit of 0\.5 s$"),
        (rank_bodies.raise_on_rank_1, {}, r"^rank 1 of 2: ZeroDivisionError: no$"),
    ],
)
def test_a_job_that_dies_hangs_or_is_late_fails_alone(
    left_nothing: list[int], body: Body, options: dict[str, float], message: str
) -> None:
    expected = train(spec("digits-mlp", "ddp:2", steps=3)).state_digest
    with Pool(4) as pool:
        healthy = [pool.submit_ranks(2, train, spec("digits-mlp", "ddp:2", steps=3)) for _ in range(2)]
        failing = pool.submit_ranks(2, run, body, 2, left_nothing, **options)
        healthy += [pool.submit_ranks(2, train, spec("digits-mlp", "ddp:2", steps=3)) for _ in range(2)]
        with pytest.raises(TrainingError, match=message):
            failing.result()
        assert [future.result().state_digest for future in healthy] == [expected] * 4
    assert left_nothing
    for pid in left_nothing:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_training_run_over_its_limit_is_ended() -> None:
    with Pool(2) as pool:
        late = pool.submit(train, spec("digits-mlp", steps=10**6), limit=0.5)
        assert pool.submit(train, spec("digits-mlp", steps=1)).result().steps == 1
        with pytest.raises(TrainingError, match=r"^the run was ended after its limit of 0\.5 s$"):
            late.result()


def test_many_threads_may_train_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(train, [spec("digits-mlp", layout, steps=2) for layout in ("single", "ddp:2") * 6]))
    assert len({result.state_digest for result in results[::2]}) == 1
    assert len({result.state_digest for result in results[1::2]}) == 1


def test_a_job_of_more_ranks_than_slots_is_refused_and_the_pool_goes_on() -> None:
    with Pool(2) as pool:
        with pytest.raises(UsageError, match=r"^a job of 3 ranks does not fit into 2 slots$"):
            pool.submit_ranks(3, time.sleep, 0)
        assert pool.submit(abs, -3).result() == 3
    assert Pool().slots == os.cpu_count()


def test_a_pool_that_was_shut_down_takes_nothing_and_can_drop_what_waits() -> None:
    gate = threading.Event()
    pool = Pool(1)
    running = pool.submit(gate.wait, 60)
    waiting = pool.submit(abs, -1)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(abs, -1)
    gate.set()
    pool.shutdown()
    assert running.result()
    with pytest.raises(CancelledError):
        waiting.result()


def test_a_cancelled_job_never_runs_and_frees_the_way() -> None:
    gate, ran = threading.Event(), []
    with Pool(1) as pool:
        pool.submit(gate.wait, 60)
        cancelled, after = pool.submit(ran.append, 1), pool.submit(ran.append, 2)
        assert cancelled.cancel()
        gate.set()
        after.result()
    assert ran == [2]


def test_a_pool_that_is_called_off_ends_what_runs_and_drops_what_waits(left_nothing: list[int]) -> None:
    pool = Pool(4)
    running = [pool.submit_ranks(2, run, rank_bodies.sleep_long, 2, left_nothing) for _ in range(2)]
    waiting = pool.submit(abs, -1)
    assert wait_until(lambda: len(left_nothing) == 4)
    assert pool.call_off(60)
    for future in (*running, waiting):
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    for pid in left_nothing:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pool.call_off()


def test_a_job_that_has_yet_to_start_its_ranks_starts_none_once_it_is_called_off(left_nothing: list[int]) -> None:
    gate = threading.Event()

    def late() -> None:
        gate.wait(60)
        run(rank_bodies.report, 2, left_nothing)

    pool = Pool(2)
    future = pool.submit(late)
    assert not pool.call_off(0)
    gate.set()
    with pytest.raises(CancelledError):
        future.result(timeout=60)
    assert left_nothing == []
