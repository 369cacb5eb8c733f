"""Schedules of both algorithms, in every form, against an executor that keeps bags of names."""

from collections import Counter

import pytest
from hypothesis import given, settings
from mesh_by_hand import check_sum, check_ways, loads, meshes, summed_names

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.plan import forms, plan
from flipper.mesh.proof import prove, traffic


def all_forms(mesh):
    """Every schedule; a mesh in which each row and column has a failed chip has none of ring2d."""
    yield from forms(mesh, "ring")
    try:
        yield from forms(mesh, "ring2d")
    except UsageError:
        rows, columns = ({divmod(chip, mesh.columns)[axis] for chip in mesh.failed} for axis in (0, 1))
        assert len(rows) == mesh.rows
        assert len(columns) == mesh.columns


@settings(max_examples=30)
@given(meshes(most=5))
def test_every_survivor_ends_with_every_vector_exactly_once(mesh):
    for schedule in all_forms(mesh):
        check_ways(schedule)
        check_sum(schedule)
        assert prove(schedule).problem is None
        counted = traffic(schedule)
        assert (counted.max_link_load, counted.conflicts) == loads(schedule)


@pytest.mark.parametrize("algorithm", ["ring", "ring2d"])
@pytest.mark.parametrize(
    ("shape", "holes"),
    [("8x8", ["2x2@2,4"]), ("8x8", ["2x2@3,3", "0,7"]), ("8x6", ["4x2@2,2"]), ("7x5", ["3,2"]), ("2x8", ["0,3"])],
)
def test_boards_blocks_and_single_chips_are_gone_round(algorithm, shape, holes):
    schedule = plan(Mesh.parse(shape, holes), algorithm)
    check_ways(schedule)
    check_sum(schedule)


def test_the_intact_ring_shares_no_link():
    assert loads(plan(Mesh.parse("4x6"), "ring")) == (1, 0)


def test_a_chip_that_hangs_on_a_ring_shares_no_link_either():
    """Each half of its vector goes to another neighbour."""
    schedule = plan(Mesh.parse("6x6", ["2,2"]), "ring")
    assert "hung" in schedule.variant
    assert loads(schedule) == (1, 0)


@pytest.mark.parametrize("holes", [["2x2@0,6"], ["2x2@4,6"], ["4x4@8,4"], ["2x2@6,14"]])
def test_rows_with_a_hole_hang_on_the_others_without_slowing_them(holes):
    schedule = next(iter(forms(Mesh.parse("8x16", holes) if "4x4" not in holes[0] else Mesh.parse("12x16", holes),
                               "ring2d")))  # fmt: skip
    assert schedule.variant.startswith("row pairs,")
    first = schedule.phases[0]
    alone = type(schedule)(schedule.mesh, "", "", schedule.chunks, (first,))
    assert loads(alone) == (1, 0)


def test_the_second_phase_goes_round_the_hole():
    schedule = next(iter(forms(Mesh.parse("8x8", ["2x2@2,2"]), "ring2d")))
    detours = list(schedule.detours())
    assert detours
    for route in detours:
        assert {chip % 8 for chip in (route[0], route[-1])} <= {2, 3}
        assert not set(route) & schedule.mesh.failed


def test_what_no_form_of_ring2d_serves_is_told_with_what_does():
    with pytest.raises(UsageError, match=r"each row and each column has a failed chip; --algorithm ring does"):
        plan(Mesh.parse("4x4", ["0,1", "1,3", "2,0", "3,2"]), "ring2d")


def test_what_no_scheme_serves_is_told():
    for algorithm in ("ring", "ring2d"):
        with pytest.raises(UsageError, match="no scheme serves this mesh: 2 of 6 survivors"):
            plan(Mesh.parse("2x4", ["2x1@0,1"]), algorithm)


def test_an_unknown_algorithm_is_told():
    with pytest.raises(UsageError, match="known: ring, ring2d"):
        plan(Mesh.parse("2x4"), "star")


def test_the_oracle_sees_a_schedule_that_sums_nothing():
    mesh = Mesh.parse("2x2")
    whole = plan(mesh, "ring")
    nothing = type(whole)(mesh, "ring", "", whole.chunks, ())
    assert summed_names(nothing)[(0, 0), 0] == Counter([(0, 0)])
    with pytest.raises(AssertionError):
        check_sum(nothing)
