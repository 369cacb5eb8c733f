"""What the process of one simulated strategy does: set the run up, simulate it, evaluate what came out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from flipper.errors import TrainingError, UsageError
from flipper.failstop.failures import Trace
from flipper.failstop.simulate import NOBODY, SimulationSpec, interval
from flipper.failstop.simulator import Simulation
from flipper.failstop.workers import Rules, Workers
from flipper.training import canonical, loop
from flipper.training.ranks import Emit, Place

TOLD_SECONDS: Final = 0.1
"""Between two words about how far it is."""


def simulate_strategy(spec: SimulationSpec, strategy: str, timed: bool, place: Place, emit: Emit) -> None:
    """Simulate one strategy, or the run that nothing happens to, and emit its outcome. timed: see simulate.outcome."""
    run = loop.begin(spec.train, place, emit, batch_size=spec.batch_size)
    if spec.workers > run.recipe.batch_size:
        raise UsageError(f"--workers {spec.workers}: a batch has {run.recipe.batch_size} samples; --batch-size sets it")
    clean = strategy == NOBODY
    rules = Rules("rollback" if clean else strategy, spec.world_batch, spec.world_rate, spec.lost_share)
    workers = Workers(run, spec.workers, rules, spec.mode == "exact", timed)
    told = 0.0

    def tell(step: int) -> None:
        nonlocal told
        if time.monotonic() - told > TOLD_SECONDS or step == run.total:
            told = time.monotonic()
            emit({"event": "simulated", "strategy": strategy, "step": step, "steps": run.total})

    simulation = Simulation(
        workers,
        Trace(()) if clean else spec.failures,
        replace(spec.costs, snapshot=0.0) if clean else spec.costs,
        run.total,
        0,
        spec.min_ranks,
        tell,
    )
    if strategy == "restart":
        simulation.save_every = interval(spec, simulation.step_seconds)
    error = None
    try:
        simulation.run()
        if not timed:
            run.evaluate()
    except TrainingError as problem:
        error = str(problem)
    values = {
        "failures": len(simulation.lost),
        "clock": simulation.clock,
        "ideal": simulation.ideal,
        "world_size": len(workers.alive),
        "save_every": simulation.save_every,
        "state_digest": canonical.digest(run.layout.gather()) if error is None and not timed else "",
        "error": error,
    }
    emit({"event": "outcome", "values": values})
