"""The local engine: as many runs at once as their ranks fit on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from flipper.campaigns.engines.engine import Engine
from flipper.training.pool import Pool


@contextmanager
def local_engine(workers: int | None) -> Iterator[Engine]:
    """workers: ranks at once; as many as there are processors without it."""
    pool = Pool(workers or _processors())
    try:
        yield Engine(pool, pool.slots)
    except BaseException:
        pool.call_off()
        raise
    pool.shutdown()


def _processors() -> int:
    """Those that this process may use: a batch system's share of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
