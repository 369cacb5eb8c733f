"""Routed: sums over ranks that stand for the chips of a mesh, by a schedule that goes round the failed ones.

A message goes from rank to rank at once, whatever chips it would pass on the mesh; who sends what to whom, in what
order, and who adds it, is the schedule's.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from flipper.mesh.schedule import Schedule
from flipper.training.parallel.reduction import done, padded_for


@dataclass(frozen=True)
class Message:
    """One message of this rank's. start, stop: chunks. tag: its place among all of that step."""

    peer: int
    start: int
    stop: int
    tag: int


@dataclass(frozen=True)
class Turn:
    """What this rank does in one step. adds: whether what it gets is added, or put in its place."""

    sends: tuple[Message, ...]
    gets: tuple[Message, ...]
    adds: bool


@dataclass(frozen=True)
class Program:
    """A rank's part of a schedule. chunks: equal parts of the vector."""

    chunks: int
    turns: tuple[Turn, ...]


def program(schedule: Schedule, rank: int) -> Program:
    """The part of a rank; ranks are given to survivors row by row."""
    ranks = {chip: number for number, chip in enumerate(schedule.mesh.survivors)}
    mine = schedule.mesh.survivors[rank]
    turns = []
    for phase in schedule.phases:
        lanes = phase.lanes
        at = np.flatnonzero((lanes.source == mine) | (lanes.target == mine))
        for step in range(phase.steps):
            on = at[(lanes.start[at] <= step) & (step < lanes.stop[at])]
            first = lanes.chunk(step)[on]
            sends: list[Message] = []
            gets: list[Message] = []
            for lane, start in zip(on.tolist(), first.tolist(), strict=True):
                source, target = int(lanes.source[lane]), int(lanes.target[lane])
                peer, into = (target, sends) if source == mine else (source, gets)
                into.append(Message(ranks[peer], start, start + int(lanes.width[lane]), lane))
            if sends or gets:
                turns.append(Turn(tuple(sends), tuple(gets), phase.adds))
    return Program(schedule.chunks, tuple(turns))


def routed_sums(tensors: list[Tensor], mine: Program, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The elementwise sums of every rank's tensors, the same bits on every rank, and in whatever company they are sent.

    mine: this rank's part of the schedule that all follow. Each element is summed on one rank, in the schedule's order,
    and copied to the others: which rank that is depends on its place in its own tensor alone. Raises RuntimeError when
    a rank is lost.
    """
    pieces = [padded_for(each, mine.chunks).view(mine.chunks, -1) for each in tensors]
    parts = torch.cat(pieces, dim=1)
    _exchange(parts, mine, group)
    sums = torch.split(parts, [piece.shape[1] for piece in pieces], dim=1)
    return [total.reshape(-1)[: each.numel()].view(each.shape) for total, each in zip(sums, tensors, strict=True)]


def routed_sum(tensor: Tensor, mine: Program, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of one tensor; see routed_sums."""
    return routed_sums([tensor], mine, group)[0]


def _exchange(parts: Tensor, mine: Program, group: dist.ProcessGroup | None) -> None:
    """Sum the chunks, [chunks, elements], in place."""
    for turn in mine.turns:
        arrived = [torch.empty_like(parts[each.start : each.stop]) for each in turn.gets]
        calls = [dist.P2POp(dist.irecv, buffer, each.peer, group, each.tag)
                 for each, buffer in zip(turn.gets, arrived, strict=True)]  # fmt: skip
        calls += [dist.P2POp(dist.isend, parts[each.start : each.stop], each.peer, group, each.tag)
                  for each in turn.sends]  # fmt: skip
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        for each, buffer in zip(turn.gets, arrived, strict=True):
            if turn.adds:
                parts[each.start : each.stop] += buffer
            else:
                parts[each.start : each.stop] = buffer


def sum_routed(state: tuple[dist.ProcessGroup, Program], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook that sums a bucket by a schedule, each of its gradients for itself."""
    group, mine = state
    gradients = bucket.gradients()
    for gradient, total in zip(gradients, routed_sums(gradients, mine, group), strict=True):
        gradient.copy_(total)
    return done(bucket.buffer())
