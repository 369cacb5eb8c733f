"""Engines: where a campaign's runs are made; each is a concurrent.futures.Executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from flipper.errors import UsageError


@dataclass(frozen=True)
class Engine:
    """An executor, how many runs it makes at once, and whether an error of it means that a run's worker died."""

    executor: Executor
    at_once: int
    lost: Callable[[BaseException], bool] = lambda error: False


@contextmanager
def open_engine(name: str, workers: int | None = None, scheduler: str | None = None) -> Iterator[Engine]:
    """The engine of a name, closed at the end; raises UsageError for options that don't go with it."""
    if scheduler is not None and name != "dask":
        raise UsageError("--scheduler goes with --engine dask")
    if name == "local":
        from flipper.training.pool import Pool

        pool = Pool(workers or os.cpu_count() or 1)
        try:
            yield Engine(pool, pool.slots)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
    else:
        raise UsageError(f"no engine {name!r} yet")
