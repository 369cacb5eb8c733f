"""The dask engine: runs are made by the workers of any dask cluster (dask-jobqueue, Kubernetes, ssh, LocalCluster).

What the cluster needs: flipper on every worker, and the campaign's folder under the same path. A worker makes as many
runs at once as their ranks fit into its threads, so start one worker a machine with as many threads as it has cores.
A run's ranks are processes below the worker; that a nanny's worker is daemonic, which forbids it children, is dealt
with where ranks are started (launch.py), since `distributed.worker.daemon` can't be set on a cluster of others. A
process for each run (`flipper campaign trial`) would do without that, and would import torch for each run: seconds,
where a run itself may take one.

A run whose worker dies is made again by another, until it has lost as many as the scheduler's `allowed-failures` (3).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import util
from typing import TYPE_CHECKING, Any, Final

from flipper.campaigns.engines.engine import Engine
from flipper.errors import FlipperError, UsageError
from flipper.training.pool import Pool

if TYPE_CHECKING:
    from distributed import Client

_ASKING: Final = threading.Lock()
"""functools.cache calls its function once for each thread that asks before it has answered."""


@contextmanager
def dask_engine(scheduler: str, workers: int | None = None) -> Iterator[Engine]:
    """workers: runs at once; as many as the cluster has threads without it, also while it grows."""
    client = _connect(scheduler)
    executor = DaskExecutor(client)
    try:
        from distributed import KilledWorker

        yield Engine(executor, workers or executor.threads, lambda error: isinstance(error, KilledWorker))
    finally:
        executor.shutdown(wait=False)
        client.close()


def _connect(scheduler: str) -> Client:
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address
    except ModuleNotFoundError as error:
        raise UsageError(f"--engine dask needs {error.name}; pip install 'flipper-ckpt[dask]'") from error
    for name in ("distributed", "distributed.client", "distributed.core", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is told in one line by the campaign
    try:
        resolve_address(scheduler)  # a client that fails at this would show a traceback at exit
        return Client(scheduler, set_as_default=False)
    except (OSError, ValueError) as error:
        raise FlipperError(f"no dask scheduler answers at {scheduler}: {error}") from error


class DaskExecutor(Executor):
    """Client.get_executor(), with a number of ranks for each run."""

    slots = 1 << 30  # a worker takes any run that it can't make beside others by itself

    def __init__(self, client: Client) -> None:
        self._client = client
        self._executor = client.get_executor(pure=False)  # two runs are never taken for one
        self._known = 1

    def threads(self) -> int:
        """Of all workers that the cluster has now; 1 at least, so that an adaptive one begins to grow."""
        with suppress(OSError), self._quiet_once_gone():  # what becomes of the runs tells it
            self._known = max(1, sum(self._client.nthreads().values()))
        return self._known

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call fn on some worker, a run of one rank."""
        return self.submit_ranks(1, functools.partial(fn, **kwargs), *args)

    def submit_ranks(self, ranks: int, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call fn on some worker, with so many of its threads' processors. BrokenExecutor: no scheduler."""
        with self._quiet_once_gone():
            future: Future[Any] = self._executor.submit(_Run(ranks, fn, args))
            return future
        raise BrokenExecutor("the dask scheduler is gone")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; with wait=False call off what is there. A run that a worker has begun goes on to its end."""
        with self._quiet_once_gone():
            self._executor.shutdown(wait=wait)

    @contextmanager
    def _quiet_once_gone(self) -> Iterator[None]:
        """Stop at what a client raises that has given up its scheduler; all runs were called off with it."""
        try:
            yield
        except Exception:  # AttributeError, ClosedClientError or another, by dask's version
            if self._client.status != "closed":
                raise


@dataclass(frozen=True)
class _Run:
    """A call that dask handles as one thing, without looking for its own futures in the arguments."""

    ranks: int
    work: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        from distributed import get_worker

        pool = _pool(get_worker().state.nthreads)
        return pool.submit_ranks(min(self.ranks, pool.slots), self.work, *self.arguments).result()


def _pool(slots: int) -> Pool:
    """The pool of this worker, whose runs end with it: one for all of its threads, which ask at the same time."""
    with _ASKING:
        return _started_pool(slots)


@functools.cache
def _started_pool(slots: int) -> Pool:
    pool = Pool(slots)
    util.Finalize(None, pool.call_off, exitpriority=10)
    return pool
