"""RunRecord: what one run came to, as it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

KINDS: Final = ("golden", "control", "null", "trial", "audit")

COMPLETED, IDENTICAL, NONFINITE = "completed", "identical", "non-finite"
REFUSED, CRASH, HANG = "refused", "crash", "hang"
"""How a run ended: at its last step; early, since its future was known (two ways); or it failed (three ways)."""
FAILED: Final = (REFUSED, CRASH, HANG)


@dataclass
class RunRecord:
    """One run. Numbers that a run didn't come to are None.

    kind: of KINDS. checkpoint: that a user's command resumed from, unaltered; None with a recipe. settings: the axes
    that its command line asks for, as text.
    cell, trial: of a trial or audit; of a null trial its number, of others 0. ended: see above.
    steps: (step, loss, gradient norm) in order; evals: (step, loss, metric); replicas: (step, largest difference).
    detected: (detector, step, rank). faults: (tensor, element, bits, before, after), the first thousand of `struck`.
    resident: per rank, the bits that it keeps in memory, by what they are. population: eligible bits of the faults.
    deaths: of ranks, that were asked for, as `--kill` has them; lost: (rank, step, seconds until it was noticed), those
    that came; recovery_seconds: from the notices until training went on; steps_again: done again; world_size: ranks
    left after the last death, None where nobody died.
    weight: of the trial among those of its cell, where faults are not drawn uniformly. plan: a key that is equal for
    equal faults under one layout. reused: (cell, trial) that had the same plan, whose result this is.
    """

    kind: str
    parallel: str
    training_seed: int
    checkpoint: str | None = None
    settings: str = ""
    cell: int = -1
    trial: int = 0
    seed: int | None = None
    reach: str = "all"
    fingerprint: str = ""
    ended: str = COMPLETED
    error: str | None = None
    first_step: int = 0
    last_step: int = 0
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    evals: list[tuple[int, float, float]] = field(default_factory=list)
    replicas: list[tuple[int, float]] = field(default_factory=list)
    detected: list[tuple[str, int, int]] = field(default_factory=list)
    loss: float | None = None
    metric: float | None = None
    max_abs_parameter: float | None = None
    nonfinite: int | None = None
    state_distance: float | None = None
    state_digest: str = ""
    resume_digest: str = ""
    faults: list[tuple[str, int, list[int], Any, Any]] = field(default_factory=list)
    struck: int = 0
    struck_nonfinite: int = 0
    resident: list[dict[str, int]] = field(default_factory=list)
    population: int = 0
    weight: float = 1.0
    plan: str = ""
    reused: tuple[int, int] | None = None
    deaths: list[str] = field(default_factory=list)
    lost: list[tuple[int, int, float]] = field(default_factory=list)
    recovery_seconds: float = 0.0
    steps_again: int = 0
    world_size: int | None = None
    seconds: float = 0.0

    @classmethod
    def stored(cls, values: dict[str, Any]) -> RunRecord:
        """The record of what `summary` and `detail` gave; without the latter its long series are empty.

        It leaves out __init__, which takes as long as reading the JSON: status looks at ten thousand of them.
        """
        record = cls.__new__(cls)
        for name in _LISTS:
            values.setdefault(name, [])
        record.__dict__ = values
        return record

    @property
    def failed(self) -> bool:
        """Whether it didn't come to an end."""
        return self.ended in FAILED

    @property
    def ended_early(self) -> bool:
        """Whether it was stopped since its future was known."""
        return self.ended in (IDENTICAL, NONFINITE)

    def summary(self) -> dict[str, Any]:
        """All but the long series and the faults."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in LONG}

    def detail(self) -> dict[str, Any]:
        """The long series, and the faults."""
        return {name: getattr(self, name) for name in LONG}


_LISTS: Final = tuple(each.name for each in fields(RunRecord) if each.default_factory is list)

LONG: Final = ("steps", "faults", "replicas")
"""Fields that are stored apart, since few questions need them."""
