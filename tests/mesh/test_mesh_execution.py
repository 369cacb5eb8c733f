"""Schedules that really run: a process for each chip, over gloo."""

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mesh_by_hand import summed_floats

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.plan import forms, plan
from flipper.training.launch import run_ranks
from flipper.training.mesh_execution import execute
from flipper.training.parallel.routed import program, routed_sums


@pytest.mark.parametrize("algorithm", ["ring", "ring2d"])
def test_twelve_chips_round_a_board_end_with_the_same_bits(algorithm):
    done = execute(plan(Mesh.parse("4x4", ["2x2@0,2"]), algorithm), elements=5003, rounds=1)
    assert (done.ranks, done.elements, done.equal, done.exact) == (12, 5003, True, True)


def test_every_form_sums_round_the_middle_of_nine():
    mesh = Mesh.parse("3x3", ["1,1"])
    for schedule in [*forms(mesh, "ring"), *forms(mesh, "ring2d")]:
        done = execute(schedule, elements=999, rounds=1)
        assert (done.ranks, done.equal, done.exact) == (8, True, True), schedule.variant


def sums_of(schedule, lengths, place, emit):
    """Rank 0 tells what the ranks' vectors of these lengths came to, summed together and each for itself."""
    mine = program(schedule, place.rank)
    tensors = [torch.from_numpy(vector(place.rank, length)) for length in lengths]
    together = routed_sums(tensors, mine)
    apart = [routed_sums([each], mine)[0] for each in tensors]
    same = all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    said = [None] * place.world
    dist.all_gather_object(said, (same, [each.numpy().tobytes() for each in together]))
    if place.rank == 0:
        emit({"event": "sums", "said": said})


def vector(rank, length):
    return np.random.default_rng((rank, length)).standard_normal(length).astype(np.float32)


def test_ranks_add_in_the_order_of_the_schedule_whatever_is_sent_together():
    """Against the messages applied one by one to float32; a vector's sum doesn't depend on its company."""
    schedule = plan(Mesh.parse("2x3", ["0,1"]), "ring")
    lengths = (schedule.chunks * 7, 3, 1)
    heard = []
    run_ranks(functools.partial(sums_of, schedule, lengths), 5, heard.append, timeout=60)
    (event,) = heard
    assert all(same for same, _ in event["said"])
    for number, length in enumerate(lengths):
        padded = np.zeros((5, -(-length // schedule.chunks) * schedule.chunks), np.float32)
        for rank in range(5):
            padded[rank, :length] = vector(rank, length)
        chunks = padded.reshape(5, schedule.chunks, -1)
        by_hand = np.stack([summed_floats(schedule, chunks[:, :, each]) for each in range(chunks.shape[2])], axis=2)
        for rank, (_, sums) in enumerate(event["said"]):
            assert sums[number] == by_hand[rank].reshape(-1)[:length].tobytes()


def test_too_many_chips_are_not_started():
    with pytest.raises(UsageError, match=r"at most 64 and not 100"):
        execute(plan(Mesh.parse("10x10"), "ring2d"))
