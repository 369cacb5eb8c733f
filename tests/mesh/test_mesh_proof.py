"""The proof finds what is wrong with schedules that are."""

from dataclasses import replace

import numpy as np
import pytest
from mesh_by_hand import check_sum

from flipper.mesh.chips import Mesh
from flipper.mesh.plan import plan
from flipper.mesh.proof import prove
from flipper.mesh.schedule import Lanes, Schedule


def changed(schedule: Schedule, number: int, **lanes: object) -> Schedule:
    """The schedule with some columns of one phase's lanes replaced."""
    phases = list(schedule.phases)
    phases[number] = replace(phases[number], lanes=replace(phases[number].lanes, **lanes))
    return replace(schedule, phases=tuple(phases))


@pytest.fixture(params=["ring", "ring2d"])
def schedule(request):
    return plan(Mesh.parse("4x4", ["2x2@0,2"]), request.param)


def test_a_message_that_is_left_out_is_found(schedule):
    for number, phase in enumerate(schedule.phases):
        for lane in range(0, len(phase.lanes), 5):
            stop = phase.lanes.stop.copy()
            stop[lane] -= 1
            wrong = changed(schedule, number, stop=stop)
            with pytest.raises(AssertionError):
                check_sum(wrong)
            assert not prove(wrong).holds


def test_a_lane_that_sends_another_chunk_is_found(schedule):
    for number, phase in enumerate(schedule.phases):
        offset = phase.lanes.offset.copy()
        offset[1] += 1
        assert not prove(changed(schedule, number, offset=offset)).holds


def test_a_lane_that_is_there_twice_is_found(schedule):
    lanes = schedule.phases[0].lanes
    once_more = Lanes(*(np.append(getattr(lanes, name), getattr(lanes, name)[0]) for name in vars(lanes)))
    wrong = replace(schedule, phases=(replace(schedule.phases[0], lanes=once_more), *schedule.phases[1:]))
    assert "twice" in prove(wrong).problem


def test_a_way_over_a_failed_chip_is_found(schedule):
    """The chip that fails after planning is one that some message passes, or ends at."""
    failed = replace(schedule, mesh=schedule.mesh.without([schedule.mesh.survivors[5]]))
    assert "failed chip" in prove(failed).problem or "no link" in prove(failed).problem


def test_a_route_that_jumps_is_found():
    schedule = plan(Mesh.parse("8x8", ["2x2@2,2"]), "ring2d")
    number = next(number for number, phase in enumerate(schedule.phases) if phase.routes)
    pair, route = next(iter(schedule.phases[number].routes.items()))
    phases = list(schedule.phases)
    phases[number] = replace(phases[number], routes={**phases[number].routes, pair: (route[0], route[-1])})
    assert "no link" in prove(replace(schedule, phases=tuple(phases))).problem
    phases[number] = replace(phases[number], routes={**phases[number].routes, pair: route[:-1]})
    assert "leads from" in prove(replace(schedule, phases=tuple(phases))).problem


def test_sums_that_are_told_before_they_are_whole_are_found(schedule):
    assert "hasn't got whole" in prove(replace(schedule, phases=schedule.phases[::-1])).problem


def test_a_schedule_without_its_end_is_found(schedule):
    assert "without the whole sum" in prove(replace(schedule, phases=schedule.phases[:-1])).problem


def test_messages_of_one_phase_must_be_of_one_length(schedule):
    width = schedule.phases[0].lanes.width.copy()
    width[0] += 1
    assert "of one length" in prove(changed(schedule, 0, width=width)).problem
