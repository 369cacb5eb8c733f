"""A survivor on a mesh: when a rank is lost, the others plan anew, and go round its chip from then on."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flipper.errors import TrainingError, UsageError
from flipper.failstop.kills import Kill
from flipper.failstop.messages import Lost, Plan
from flipper.failstop.survivor import GlooSurvivor, Sum
from flipper.mesh.allreduce import MeshAllreduce
from flipper.training.parallel.routed import Program, program, routed_sum
from flipper.training.ranks import Place


class RoutedSum:
    """As reduction.OrderedSum; its messages go from step to step of the schedule, so all of it is done at once."""

    def __init__(self, flat: Tensor, mine: Program) -> None:
        self._total = routed_sum(flat, mine)

    def gather(self) -> None:
        """Nothing is left to do."""

    def result(self) -> Tensor:
        """The sum."""
        return self._total


class RoutedSurvivor(GlooSurvivor):
    """A rank that stands for a chip of a mesh."""

    def __init__(
        self, place: Place, send: Callable[[object], None], kills: tuple[Kill, ...], mesh: MeshAllreduce
    ) -> None:
        super().__init__(place, send, kills)
        self._mesh = mesh
        self._program = program(mesh.schedule(), place.rank)

    def begin_sum(self, flat: Tensor) -> Sum:
        """By the schedule of those that are left."""
        return RoutedSum(flat, self._program)

    def recover(self, report: Callable[[int], Lost]) -> Plan:
        """As in Survivor; then the schedule is made anew, the same by all. Raises TrainingError when none is found."""
        plan = super().recover(report)
        try:
            schedule = self._mesh.schedule(self.ranks)
        except UsageError as error:
            raise TrainingError(f"the survivors can't go round the chips that are lost: {error}") from error
        self._program = program(schedule, self.place.rank)
        if self.place.rank == 0:
            failed = [",".join(map(str, schedule.mesh.place(chip))) for chip in sorted(schedule.mesh.failed)]
            self._send({
                "event": "rerouted", "failed": failed, "algorithm": schedule.algorithm, "variant": schedule.variant,
                "steps": schedule.steps,
            })  # fmt: skip
        return plan
