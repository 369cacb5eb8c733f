"""The simulator: one run of many workers, failures that strike it, and what each strategy makes of them.

State is computed faithfully, time is charged by the cost model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from flipper.errors import TrainingError
from flipper.failstop.costs import Costs
from flipper.failstop.failures import Failure, Failures
from flipper.failstop.workers import Checkpoint, Death, Workers

HOPELESS: Final = 100
"""Times as long as without failures: a run that is not done then, never will be."""
MOST_IN_A_ROW: Final = 10_000
"""Failures without a step between them: where they come so fast that time hardly passes, HOPELESS is never reached."""


@dataclass
class Simulation:
    """One strategy's run. clock: seconds; ideal: what the same steps take without failures and precautions.

    save_every: steps between checkpoints, of "restart". lost: the failures that struck; lost_before: how many of them
    before the last step that was made.
    """

    workers: Workers
    failures: Failures
    costs: Costs
    total: int
    save_every: int
    min_ranks: int = 1
    on_step: Callable[[int], None] = lambda step: None
    clock: float = 0.0
    ideal: float = 0.0
    lost: list[Failure] = field(default_factory=list)
    lost_before: int = 0

    def run(self) -> None:
        """Until the last step. Raises TrainingError when fewer than min_ranks are left."""
        self._streams: dict[int, Iterator[float]] = {each: self.failures.of(each) for each in self.workers.alive}
        self._coming: list[tuple[float, int]] = []
        for worker in self.workers.alive:
            self._expect(worker)
        begun = self.workers.run.progress.step
        self.ideal = (self.total - begun) * self.step_seconds
        checkpoint = self.workers.checkpoint() if self._restarts else None
        while self.workers.run.progress.step < self.total:
            if checkpoint is None:
                self._shrinking()
            else:
                checkpoint = self._restarting(checkpoint)
            self.on_step(self.workers.run.progress.step)

    @property
    def _restarts(self) -> bool:
        return self.workers.rules.recovery == "restart"

    def _expect(self, worker: int) -> None:
        """Take the next failure of a worker into what is to come."""
        if (time := next(self._streams[worker], None)) is not None:
            heapq.heappush(self._coming, (time, worker))

    def _next(self, before: float) -> Failure | None:
        """The next failure of a worker that lives, if it comes before this time."""
        while self._coming and self._coming[0][0] < before:
            time, worker = heapq.heappop(self._coming)
            if self._restarts:
                self._expect(worker)
            if worker in self.workers.alive:
                self.lost.append(Failure(time, worker))
                return self.lost[-1]
        return None

    @property
    def step_seconds(self) -> float:
        """What a step takes while all workers live and nothing happens."""
        return self._ends()[-1]

    def _ends(self, without: int = 0) -> list[float]:
        """When the buckets of a step end, of those that live but for so many."""
        workers = self.workers
        left = len(workers.alive) - without
        spread = left if workers.rules.world_batch == "fixed" else workers.count
        samples = -(-workers.run.recipe.batch_size // spread)
        return self.costs.bucket_ends(samples, workers.sizes, left)

    def _shrinking(self) -> None:
        """One step of "rollback" or "lossy", with what is lost in it."""
        costs, lossy = self.costs, self.workers.rules.recovery == "lossy"
        start = self.clock + (0.0 if lossy else costs.snapshot)
        ends = self._ends()
        deaths: list[Death] = []
        end = start + ends[-1]
        while (failure := self._next(end)) is not None:
            done = sum(start + each <= failure.time for each in ends)
            least = deaths[-1].bucket if deaths else 0
            deaths.append(Death(failure.worker, max(done, least)))
            if len(self.workers.alive) - len(deaths) < self.min_ranks:
                self.workers.lose(deaths)
                raise TrainingError(f"fewer than {self.min_ranks} of {self.workers.count} workers are left")
            noticed = max(failure.time, start) + costs.detect + costs.regroup
            if lossy:
                end += noticed - max(failure.time, start)
            else:
                start, ends = noticed, self._ends(len(deaths))
                end = start + ends[-1]
        self.workers.step(deaths)
        self.clock = end

    def _restarting(self, checkpoint: Checkpoint) -> Checkpoint:
        """One step of "restart", or the way back when a worker is lost in it; returns the last checkpoint."""
        costs = self.costs
        end = self.clock + self._ends()[-1]
        step = self.workers.run.progress.step + 1
        saves = step % self.save_every == 0 or step == self.total
        end += costs.write if saves else 0.0
        if (failure := self._next(end)) is not None:
            back = costs.detect + costs.respawn + costs.read
            begun = max(failure.time, self.clock)
            while (failure := self._next(begun + back)) is not None:  # while the others come back
                begun = max(failure.time, begun)
                self._check_hope(begun)
            self._check_hope(begun)
            self.clock = begun + back
            self.workers.begin(checkpoint)
            return checkpoint
        self.workers.step()
        self.lost_before = len(self.lost)
        self.clock = end
        return self.workers.checkpoint() if saves else checkpoint

    def _check_hope(self, time: float) -> None:
        """Raise TrainingError where failures come faster than the run gets from one checkpoint to the next."""
        late = time > HOPELESS * max(self.ideal, self.costs.detect + self.costs.respawn + self.costs.read)
        if late or len(self.lost) - self.lost_before > MOST_IN_A_ROW:
            step = self.workers.run.progress.step
            raise TrainingError(f"failures come too fast: after {time:.4g} s the run is still at step {step}")
