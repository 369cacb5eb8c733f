"""BatchNorm of many workers at once: each worker's samples by their own statistics, as ranks have them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""These themselves: what a subclass does is its own."""


class WorkerNorms:
    """The norms of a module that many workers share, and the running statistics that each worker has of them."""

    def __init__(self, module: nn.Module) -> None:
        self._norms: list[Any] = [each for each in module.modules() if type(each) in NORMS]
        self._workers: list[int] = []
        self._running: dict[Any, list[Tensor]] = {}

    @contextmanager
    def of(self, workers: Sequence[int], sizes: Sequence[int]) -> Iterator[None]:
        """Inside, a batch is that of these workers with so many samples each, one after another."""
        self._workers = list(workers)
        for norm in self._norms:
            norm.forward = functools.partial(self._forward, norm, sizes)
        try:
            yield
        finally:
            for norm in self._norms:
                del norm.forward

    def take(self, worker: int) -> None:
        """Give the module the running statistics that this worker has after its last batch."""
        for norm, tables in self._running.items():
            with torch.no_grad():
                for live, table in zip((norm.running_mean, norm.running_var), tables, strict=True):
                    live.copy_(table[self._workers.index(worker)])

    def _forward(self, norm: Any, sizes: Sequence[int], batch: Tensor) -> Tensor:
        if not norm.training:
            plain: Tensor = type(norm).forward(norm, batch)
            return plain
        factor = 0.0 if norm.momentum is None else norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            factor = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else factor
        parts, tables, begin = [], [], 0
        for size, run in groupby(sizes):
            count = len(list(run))
            part, table = _normalised(norm, batch[begin : begin + size * count], count, factor)
            parts.append(part)
            tables.append(table)
            begin += size * count
        if norm.running_mean is not None:
            self._running[norm] = [torch.cat(each) for each in zip(*tables, strict=True)]
        return torch.cat(parts)


def _normalised(norm: Any, batch: Tensor, count: int, factor: float) -> tuple[Tensor, list[Any]]:
    """Of `count` workers of the same size: each one's channels beside the others', as channels of their own.

    Returns also each worker's running mean and variance after it, (count, channels).
    """
    apart = batch.reshape(count, -1, *batch.shape[1:]).transpose(0, 1)  # sample, worker, channel, ...
    weight, bias, mean, variance = (
        None if each is None else each.repeat(count)
        for each in (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    normed = functional.batch_norm(apart.flatten(1, 2), mean, variance, weight, bias, True, factor, norm.eps)
    tables = [None if each is None else each.view(count, -1) for each in (mean, variance)]
    return normed.reshape(apart.shape).transpose(0, 1).reshape(batch.shape), tables
