"""What the process of one simulated strategy does: set the run up, simulate it, evaluate what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from flipper.errors import TrainingError, UsageError
from flipper.failstop.failures import Trace
from flipper.failstop.simulate import NOBODY, Case, SimulationSpec, interval
from flipper.failstop.simulator import Simulation
from flipper.failstop.workers import Rules, Workers
from flipper.training import canonical, loop
from flipper.training.ranks import Emit, Place

TOLD_SECONDS: Final = 0.1
"""Between two words about how far it is."""


def simulate_strategy(spec: SimulationSpec, strategy: str, place: Place, emit: Emit) -> None:
    """Simulate one strategy, or the run that nothing happens to, and emit its outcome."""
    run = _begun(spec, place, emit)
    clean = strategy == NOBODY
    workers = Workers(run, spec.workers, _rules(spec, "rollback" if clean else strategy), spec.mode == "exact")
    told = 0.0

    def tell(step: int) -> None:
        nonlocal told
        if time.monotonic() - told > TOLD_SECONDS or step == run.total:
            told = time.monotonic()
            emit({"event": "simulated", "strategy": strategy, "step": step, "steps": run.total})

    if clean:
        spec = replace(spec, failures=Trace(()), costs=replace(spec.costs, snapshot=0.0))
    simulation, error = _simulated(spec, workers, tell)
    if error is None:
        run.evaluate()
    digest = canonical.digest(run.layout.gather()) if error is None else ""
    emit({"event": "outcome", "values": {**_values(simulation), "state_digest": digest, "error": error}})


def time_strategy(spec: SimulationSpec, strategy: str, cases: Sequence[Case], place: Place, emit: Emit) -> None:
    """Work out what one strategy takes in each case, and emit these outcomes."""
    run = _begun(spec, place, emit)
    begin = run.progress
    for number, case in enumerate(cases, start=1):
        run.start_at(begin)
        workers = Workers(run, spec.workers, _rules(spec, strategy), exact=False, timed=True)
        here = replace(spec, failures=case.failures, mtbf=case.mtbf)
        simulation, error = _simulated(here, workers, lambda step: None)
        emit({"event": "outcome", "values": {**_values(simulation), "error": error}})
        emit({"event": "simulated", "strategy": f"{strategy}, time", "step": number, "steps": len(cases)})


def _begun(spec: SimulationSpec, place: Place, emit: Emit) -> loop.Run:
    run = loop.begin(spec.train, place, emit, batch_size=spec.batch_size)
    if spec.workers > run.recipe.batch_size:
        raise UsageError(f"--workers {spec.workers}: a batch has {run.recipe.batch_size} samples; --batch-size sets it")
    return run


def _rules(spec: SimulationSpec, strategy: str) -> Rules:
    return Rules(strategy, spec.world_batch, spec.world_rate, spec.lost_share)


def _simulated(
    spec: SimulationSpec, workers: Workers, tell: Callable[[int], None]
) -> tuple[Simulation, str | None]:
    """The simulation at its end, and why it ended early if it did."""
    simulation = Simulation(workers, spec.failures, spec.costs, workers.run.total, 0, spec.min_ranks, tell)
    if workers.rules.recovery == "restart":
        simulation.save_every = interval(spec, simulation.step_seconds)
    try:
        simulation.run()
    except TrainingError as problem:
        return simulation, str(problem)
    return simulation, None


def _values(simulation: Simulation) -> dict[str, Any]:
    return {
        "failures": len(simulation.lost),
        "clock": simulation.clock,
        "ideal": simulation.ideal,
        "world_size": len(simulation.workers.alive),
        "save_every": simulation.save_every,
    }
