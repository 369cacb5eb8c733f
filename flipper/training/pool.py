"""Pool: runs many training jobs at once, as many as their ranks fit on the machine."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any, ParamSpec, TypeVar

from flipper.errors import UsageError
from flipper.training.launch import STOP

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Job:
    future: Future[Any]
    work: Callable[[], Any]
    ranks: int


class Pool(Executor):
    """An executor for functions that call `train`; a slot is a rank, not a job.

    Jobs start in the order of their submission as soon as their ranks fit. Each runs in a thread of this process, and
    its ranks are forked from the one server that has imported torch: fresh processes for each job, ended with it.
    slots: ranks that may run at once; as many as there are processors without it.
    """

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots or os.cpu_count() or 1
        self._free = self.slots
        self._queue: deque[_Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._stop, self._stopping = Pipe(duplex=False)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call fn(*args, **kwargs), a job of one rank, when a slot is free."""
        return self.submit_ranks(1, fn, *args, **kwargs)

    def submit_ranks(self, ranks: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call fn(*args, **kwargs) when `ranks` slots are free; UsageError when there are not that many in all."""
        if ranks > self.slots:
            raise UsageError(f"a job of {ranks} ranks does not fit into {self.slots} slots")
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool was shut down")
            self._queue.append(_Job(future, lambda: fn(*args, **kwargs), ranks))
            self._start_what_fits()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; wait for those that were taken."""
        with self._changed:
            self._closed = True
            if cancel_futures:
                while self._queue:
                    self._queue.popleft().future.cancel()
            while wait and (self._queue or self._threads):
                self._changed.wait(0.5)  # a signal may be seen only when the wait is over

    def call_off(self, seconds: float = 10.0) -> bool:
        """Drop the jobs that wait and end the ranks of those that run, whose futures get a CancelledError.

        Returns whether all were gone within this time: what a job does beside its ranks is not cut short.
        """
        self.shutdown(wait=False, cancel_futures=True)
        self._stopping.close()
        with self._changed:
            return self._changed.wait_for(lambda: not self._threads, seconds)

    def _start_what_fits(self) -> None:
        """Start the jobs at the head of the queue; a large one waits for its slots before smaller ones behind it."""
        while self._queue and self._queue[0].ranks <= self._free:
            job = self._queue.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            self._free -= job.ranks
            thread = threading.Thread(target=self._run, args=(job,), name="flipper-job", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self, job: _Job) -> None:
        STOP.set(self._stop)
        try:
            job.future.set_result(job.work())
        except BaseException as error:  # whatever it is belongs to whoever asks for the result
            job.future.set_exception(error)
        with self._changed:
            self._free += job.ranks
            self._threads.discard(threading.current_thread())
            self._start_what_fits()
            self._changed.notify_all()
