"""The benchmark's part on allreduce round failed chips: planning, proof, and a real allreduce."""

from measure import Row, show, work

HOLES = ("2x2@4,6", "2x2@20,9", "4x4@10,24")
"""Three of them, in 32x32."""


def planning(rounds: int) -> None:
    """The best form of each algorithm, with the cost model that chooses it; and the symbolic execution."""
    for shape, holes, limit in (("32x32", HOLES, 0.1), ("128x128", HOLES, 5.0)):
        for algorithm in ("ring", "ring2d"):
            took = work("planned", shape, algorithm, rounds, *holes)
            show([Row(f"{algorithm} on {shape} with three holes is planned", took, "limit", limit)])
    show([
        Row(f"{algorithm} on 32x32 with three holes is proved", work("proved", "32x32", algorithm, *HOLES),
            "planning", work("planned", "32x32", algorithm, rounds, *HOLES), None)
        for algorithm in ("ring", "ring2d")
    ])  # fmt: skip


def sums(rounds: int) -> None:
    """12 processes, a chip each, 4x4 round a 2x2 hole, 400 kB, against the sum in rank order."""
    own, ordered = work("routed", "ring2d", rounds), work("ordered", rounds)
    show([Row("allreduce of 400 kB on 12 ranks, 4x4 round 2x2", own, "sum in rank order", ordered, None)])
