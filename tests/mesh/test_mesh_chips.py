"""Meshes and holes as users write them."""

import pytest

from flipper.errors import UsageError
from flipper.mesh.chips import Hole, Mesh


def test_a_hole_is_one_chip_or_a_block():
    assert Hole.parse("4,6") == Hole(1, 1, 4, 6)
    assert Hole.parse("2x3@4,6") == Hole(2, 3, 4, 6)
    assert [str(Hole.parse(text)) for text in ("4,6", "2x3@4,6")] == ["4,6", "2x3@4,6"]


@pytest.mark.parametrize("text", ["", "4", "4,", "a,b", "2x2", "2x2@4", "0x2@1,1", "2x2@-1,0", "2x2@1,1,1"])
def test_what_is_no_hole_is_refused_with_what_is_allowed(text):
    with pytest.raises(UsageError, match=r"--failed .*(say which chip|at least)"):
        Hole.parse(text)


@pytest.mark.parametrize("shape", ["", "16", "16x", "0x4", "4x0", "257x4", "4x4x4", "-4x4"])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(UsageError, match="rows x columns"):
        Mesh.parse(shape)


def test_failed_chips_are_those_of_all_holes():
    mesh = Mesh.parse("3x4", ["2x2@0,1", "2,3"])
    assert mesh.failed == {1, 2, 5, 6, 11}
    assert mesh.survivors == (0, 3, 4, 7, 8, 9, 10)
    assert [mesh.place(chip) for chip in mesh.survivors[:3]] == [(0, 0), (0, 3), (1, 0)]


@pytest.mark.parametrize("hole", ["3,0", "0,4", "2x2@2,0", "2x2@0,3", "1x5@0,0"])
def test_a_hole_outside_the_mesh_is_refused_with_its_bounds(hole):
    with pytest.raises(UsageError, match=r"rows 0 to 2 and columns 0 to 3"):
        Mesh.parse("3x4", [hole])


def test_somebody_must_live():
    with pytest.raises(UsageError, match="all 12 chips"):
        Mesh.parse("3x4", ["3x4@0,0"])


def test_links_lead_to_neighbours_that_live():
    mesh = Mesh.parse("3x3", ["0,1"])
    assert set(mesh.linked[4]) == {3, 5, 7}
    assert mesh.linked[0] == (3,)
    assert mesh.linked[1] == ()


def test_survivors_that_are_cut_off_are_told():
    mesh = Mesh.parse("3x3", ["0,1", "1,0"])
    with pytest.raises(UsageError, match=r"no scheme serves this mesh: 1 of 7 survivors .* chip at 0,0"):
        mesh.refuse_parts()


def test_the_transposed_mesh_has_rows_for_columns():
    mesh = Mesh.parse("3x4", ["0,3"])
    turned = mesh.transposed
    assert (turned.rows, turned.columns, turned.failed) == (4, 3, {9})
    assert turned.transpose(mesh.transpose([5, 7])).tolist() == [5, 7]
