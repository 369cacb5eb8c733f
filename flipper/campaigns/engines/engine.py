"""Engine: an executor, and what the coordinator has to know of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """An executor, how many runs it makes at once (or what tells that when asked), and what its errors mean.

    executor: a `submit_ranks(ranks, ...)`, if it has one, is called instead of `submit`; `slots` says of how many ranks
    a run may be at most. lost: whether an error of it means that a run's worker died, each time that it was tried.
    """

    executor: Executor
    at_once: int | Callable[[], int]
    lost: Callable[[BaseException], bool] = lambda error: False
