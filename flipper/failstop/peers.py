"""Peer copies: each rank's state, in its own memory and in that of the ranks after it, so that a lost one comes back.

In the manner of diskless checkpointing (Plank, Li, Puening, "Diskless Checkpointing", IEEE TPDS 9, 1998): a rank sends
its state to its neighbours in a ring; what a dead one held is taken from the memory of the next that lives.
"""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from flipper.failstop.salvage import HandedOver
from flipper.failstop.spec import Copy
from flipper.training import seeds
from flipper.training.canonical import State
from flipper.training.loop import Run
from flipper.training.progress import Progress
from flipper.training.ranks import Place


class Ring(Protocol):
    """How ranks pass copies on."""

    def passed(self, mine: Tensor, distance: int, into: Tensor | None) -> Tensor:
        """Send bytes to the rank so many after this one; returns those of the one so many before it.

        into: where to put them, if it has their size. A collective; raises RuntimeError when a rank is lost.
        """


class GlooRing:
    """Ranks of torch.distributed, in a group of their own."""

    def __init__(self, place: Place) -> None:
        self._rank, self._world = place.rank, place.world
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=place.timeout))

    def passed(self, mine: Tensor, distance: int, into: Tensor | None) -> Tensor:
        """As Ring.passed."""
        coming = torch.zeros(1, dtype=torch.int64)
        self._swap(torch.tensor([mine.numel()]), coming, distance)
        if into is None or into.numel() != int(coming):
            into = torch.empty(int(coming), dtype=torch.uint8)
        self._swap(mine, into, distance)
        return into

    def _swap(self, mine: Tensor, theirs: Tensor, distance: int) -> None:
        after, before = (self._rank + distance) % self._world, (self._rank - distance) % self._world
        for work in (dist.isend(mine, after, self._group), dist.irecv(theirs, before, self._group)):
            assert work is not None
            work.wait()


class Packed:
    """A state as one run of bytes, which is a safetensors file."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        whole = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()})
        self.bytes = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        self._form = _form(state)
        self._parts = self._views(state)

    def take(self, state: Mapping[str, Tensor]) -> bool:
        """Hold another state instead; False when its tensors are others."""
        if _form(state) != self._form:
            return False
        with torch.no_grad():
            torch._foreach_copy_(self._parts, [tensor.detach() for tensor in state.values()])
        return True

    def _views(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Where each tensor lies in the bytes."""
        (length,) = struct.unpack("<Q", self.bytes[:8].numpy().tobytes())
        header: dict[str, Any] = json.loads(self.bytes[8 : 8 + length].numpy().tobytes())
        data = self.bytes[8 + length :]
        return [
            data[slice(*header[name]["data_offsets"])].view(tensor.dtype).view(tensor.shape)
            for name, tensor in state.items()
        ]


def _form(state: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in state.items()]


class PeerCopies:
    """What one rank keeps: its own state and that of the `count` ranks before it, as they were at two moments.

    Two, so that of one of them all copies are there whenever a rank is lost: each step is a collective of all ranks, so
    nobody begins to make the copies of a moment before all have those of the moment before it.
    """

    def __init__(self, run: Run, ring: Ring, count: int, every: int) -> None:
        """every: steps from one moment to the next."""
        self._run, self._ring, self._count, self._every = run, ring, count, every
        self._rank, self._world = run.layout.grid.rank, run.layout.grid.world
        self._kept: dict[int, list[Tensor]] = {}
        self._own: dict[int, Packed] = {}

    def keep(self) -> None:
        """Before a step: make copies, if it is time. A collective; raises RuntimeError when a rank is lost."""
        step = self._run.progress.step
        if self._kept and step - max(self._kept) < self._every:
            return
        former: list[Tensor] = []
        own: Packed | None = None
        if len(self._kept) == 2:
            oldest = min(self._kept)
            former, own = self._kept.pop(oldest), self._own.pop(oldest)
        state = own_state(self._run)
        if own is None or not own.take(state):
            own = Packed(state)
        copies = [own.bytes]
        for distance in range(1, self._count + 1):
            copies.append(self._ring.passed(own.bytes, distance, former[distance] if former else None))
        self._kept[step], self._own[step] = copies, own

    def hand_over(self, box: str, send: Callable[[object], None]) -> None:
        """Write what is kept to a file that outlives this rank, and tell where it lies."""
        found: dict[tuple[int, int], Copy] = {}
        with suppress(OSError), Path(box).open("r+b") as file:  # no room; others may have it, too
            for step, copies in self._kept.items():
                for distance, copy in enumerate(copies):
                    offset = file.tell()
                    file.write(copy.numpy().data)
                    found[(self._rank - distance) % self._world, step] = Copy(box, offset, copy.numel(), step)
            file.flush()
        send(HandedOver(found))


def own_state(run: Run) -> State:
    """All that this rank's part of the run depends on, its buffers too."""
    layout = run.layout
    return {
        **{name: shard.tensor for name, shard in layout.live().items()},
        **(layout.schedule.to_state() if layout.schedule is not None else {}),
        **seeds.capture(layout.grid.rank, str(layout.grid.parallel), layout.grid.device),
        **run.progress.to_state(),
    }


def take_up(run: Run, copy: Copy) -> None:
    """Go on from a copy of this rank's own state."""
    with open(copy.path, "rb") as file:
        file.seek(copy.offset)
        state = load(file.read(copy.length))
    layout = run.layout
    layout.load(state, own=True)
    run.start_at(Progress.from_state(state, run.batches))
    seeds.reinstate(state, layout.grid.rank, str(layout.grid.parallel), layout.grid.device)
