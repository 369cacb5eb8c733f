"""Collisions: a plan from elsewhere that strikes the same bytes through two tensors, views of one storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flipper.checkpoints.elements import Int
from flipper.checkpoints.tensor import run_of
from flipper.checkpoints.views import sharing
from flipper.errors import MismatchError
from flipper.injection.changes import Struck


def refuse_collisions(struck: Sequence[Struck]) -> None:
    """Raise MismatchError when two struck elements have bits in common: neither row would then tell what is there.

    A drawn plan has none: every byte is in a population once.
    """
    by_name = {one.tensor.name: one for one in struck}
    for cluster in sharing([one.tensor for one in struck]):
        parts = [_first_bits(by_name[tensor.name]) for tensor in cluster]
        widths = [tensor.layout.width for tensor in cluster]
        owner = np.repeat(np.arange(len(cluster)), [len(part) for part in parts])
        start = np.concatenate(parts)
        end = np.concatenate([part + width for part, width in zip(parts, widths, strict=True)])
        rank = np.argsort(start, kind="stable")
        clashes = np.flatnonzero(start[rank][1:] < np.maximum.accumulate(end[rank])[:-1])
        if len(clashes):
            one, other = (cluster[int(owner[rank[clashes[0] + step]])].name for step in (0, 1))
            raise MismatchError(f"{one} and {other} share bytes, and the plan strikes the same ones through both")


def _first_bits(struck: Struck) -> Int:
    """Where each struck element begins in its file or archive entry, in bits."""
    tensor = struck.tensor
    run = run_of(tensor.place)
    assert run is not None  # sharing() knows no other places
    (part,) = run[1].locate(tensor.dims, tensor.layout, struck.flat)
    return part.offsets * 8 + (0 if part.shifts is None else part.shifts)
