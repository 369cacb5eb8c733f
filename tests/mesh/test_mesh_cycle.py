"""The ring over all survivors: it visits each once, shares no link, and has no long hops where none are needed."""

import itertools

import pytest
from hypothesis import given, settings
from mesh_by_hand import has_ring, meshes

from flipper.errors import UsageError
from flipper.mesh.chips import Mesh
from flipper.mesh.cycle import Cycle, cycle


def check(mesh: Mesh, found: Cycle) -> None:
    assert sorted(found.chips) == [chip for chip in range(mesh.size) if chip not in mesh.failed]
    assert len(found.routes) == (len(found.chips) if len(found.chips) > 1 else 0)
    for here, there, route in zip(found.chips, (*found.chips[1:], found.chips[0]), found.routes, strict=False):
        assert (route[0], route[-1]) == (here, there)
    links = [link for route in found.routes for link in itertools.pairwise(route)]
    assert len(set(links)) == len(links), "a link is crossed twice in the same direction"
    for one, other in links:
        assert not {one, other} & mesh.failed
        (row, column), (down, right) = (divmod(chip, mesh.columns) for chip in (one, other))
        assert abs(row - down) + abs(column - right) == 1


@settings(max_examples=150)
@given(meshes(most=9))
def test_every_survivor_is_visited_once_and_no_link_is_shared(mesh):
    check(mesh, cycle(mesh))


@settings(max_examples=100)
@given(meshes(most=5))
def test_all_hops_are_to_neighbours_wherever_that_is_possible(mesh):
    found = cycle(mesh)
    if has_ring(mesh):
        assert found.long_hops == 0


@pytest.mark.parametrize(
    ("shape", "holes"),
    [
        ("4x4", ["2x2@0,2"]), ("4x4", ["2x2@1,1"]), ("16x32", ["2x2@4,6"]), ("16x32", ["2x2@5,7"]),
        ("16x32", ["4x4@4,8"]), ("16x32", ["4x2@6,30"]), ("32x32", ["2x2@4,6", "2x2@20,9", "4x4@11,24"]),
        ("7x8", ["2x2@2,3"]), ("5x5", ["0,0"]),
    ],
)  # fmt: skip
def test_boards_and_blocks_are_gone_round_by_neighbours(shape, holes):
    mesh = Mesh.parse(shape, holes)
    found = cycle(mesh)
    check(mesh, found)
    assert found.long_hops == 0


@pytest.mark.parametrize("shape", ["4x4", "16x32"])
def test_an_odd_number_of_survivors_needs_one_long_hop_and_gets_no_more(shape):
    mesh = Mesh.parse(shape, ["1,1"])
    found = cycle(mesh)
    check(mesh, found)
    assert found.long_hops == 1
    assert len(found.core) == len(found.chips) - 1


def test_a_line_is_walked_to_and_back_in_short_hops():
    found = cycle(Mesh.parse("1x40"))
    check(Mesh.parse("1x40"), found)
    assert max(len(route) - 1 for route in found.routes) <= 3


def test_survivors_that_are_cut_off_have_no_ring():
    with pytest.raises(UsageError, match="cut off"):
        cycle(Mesh.parse("4x4", ["4x1@0,1"]))
