"""What each survivor is told to do, for every way in which they can be apart."""

from __future__ import annotations

import pytest

from flipper.failstop.messages import Lost, plan_of

HERE = (0.5, 1.0, 0.1)
BEFORE = (0.7, 2.0, 0.1)


def report(place: str) -> Lost:
    """`9 look`: nine steps completed; `9 reduce 0 1`: and buckets 0 and 1 of the tenth are done."""
    completed, phase, *done = place.split()
    return Lost(0, int(completed), phase, frozenset(map(int, done)), HERE if completed == "9" else BEFORE, "gone", 0.0)


@pytest.mark.parametrize("recovery", ["rollback", "lossy"])
@pytest.mark.parametrize(
    ("places", "actions"),
    [
        # in the midst of a step: as the recovery says
        (("9 reduce", "9 reduce", "9 reduce"), ("*", "*", "*")),
        (("9 reduce 0", "9 reduce 0 1", "9 measure 0 1 2"), ("*", "*", "*")),
        # some had not met for it: nobody can have averaged anything
        (("9 meet", "9 reduce", "9 meet"), ("redo", "redo", "redo")),
        (("9 looked", "9 meet", "9 looked"), ("on", "redo", "on")),
        # between steps
        (("9 look", "9 looked", "9 look"), ("again", "again", "again")),
        (("9 looked", "9 looked", "9 looked"), ("on", "on", "on")),
        (("9 noticed", "9 look", "9 look"), ("on", "again", "again")),
        (("9 notice", "9 noticed", "9 noticed"), ("again", "again", "again")),
        # some have not yet the last step's loss
        (("8 measure 0 1 2", "9 look", "9 looked"), ("done", "again", "again")),
        (("8 measure 0 1 2", "8 measure 0 1 2", "9 meet"), ("done", "done", "redo")),
        # at the end
        (("9 looked", "9 end", "9 end"), ("on", "again", "again")),
        (("9 end", "9 ended", "9 ended"), ("again", "again", "again")),
        (("9 ended", "9 ended", "9 ended"), ("on", "on", "on")),
    ],
)
def test_each_survivor_has_its_part(places: tuple[str, ...], actions: tuple[str, ...], recovery: str) -> None:
    own = {"rollback": "redo", "lossy": "finish"}[recovery]
    reports = {rank: report(place) for rank, place in zip((0, 2, 3), places, strict=True)}
    plan = plan_of(4, recovery, reports)
    assert (plan.generation, plan.ranks) == (4, (0, 2, 3))
    assert plan.actions == tuple(own if action == "*" else action for action in actions)
    assert plan.result == HERE


def test_a_bucket_that_some_have_is_taken_from_the_first_of_them() -> None:
    places = {1: "9 reduce 0", 2: "9 reduce 0 1", 5: "9 measure 0 1 2"}
    plan = plan_of(1, "lossy", {rank: report(place) for rank, place in places.items()})
    assert plan.donors == {0: 0, 1: 1, 2: 2}


def test_what_is_done_again_has_no_donors() -> None:
    assert plan_of(1, "lossy", {0: report("8 measure 0 1"), 1: report("9 meet")}).donors == {}
