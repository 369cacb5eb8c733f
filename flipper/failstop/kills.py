"""Kills: which rank dies, or hangs, and when: `rank:1@step:20:bucket:2,signal:STOP`."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flipper.errors import UsageError

_FORM: Final = re.compile(
    r"rank:(?P<rank>\d{1,9})@(?:step:(?P<step>\d{1,9})(?::bucket:(?P<bucket>\d{1,9}))?|recovery:(?P<recovery>\d{1,9}))"
    r"(?:,signal:(?P<signal>[A-Z]+))?",
    re.ASCII,
)
SIGNALS: Final = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
LEAST_SHAPE: Final = 0.01
"""Of a Weibull distribution: with one of 0.005 its mean is more than a float holds times its scale."""


@dataclass(frozen=True)
class Kill:
    """The end of one rank, by its number at the start of the run.

    step: it dies in the step of this number, the first being 1: before its forward pass or, with a bucket, inside that
    bucket's allreduce; all ranks have finished the bucket before, and met. recovery: or it dies in the recovery of this
    number, once it has learned who the survivors are. signal: KILL, or STOP for a hang.
    """

    rank: int
    step: int | None = None
    bucket: int | None = None
    recovery: int | None = None
    signal: str = "KILL"

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read WHO@WHEN; UsageError says what is allowed."""
        found = _FORM.fullmatch(text)
        if found is None or (found["signal"] or "KILL") not in SIGNALS:
            raise UsageError(
                f"--kill {text!r}: say who and when, as rank:1@step:20, rank:1@step:20:bucket:2 or rank:1@recovery:1, "
                f"and ,signal:STOP behind it for a hang"
            )
        step, bucket, recovery = (None if (each := found[name]) is None else int(each)
                                  for name in ("step", "bucket", "recovery"))  # fmt: skip
        return cls(int(found["rank"]), step, bucket, recovery, found["signal"] or "KILL")

    def __str__(self) -> str:
        when = f"recovery:{self.recovery}" if self.step is None else f"step:{self.step}"
        bucket = "" if self.bucket is None else f":bucket:{self.bucket}"
        return f"rank:{self.rank}@{when}{bucket}" + ("" if self.signal == "KILL" else f",signal:{self.signal}")


def check(kills: Sequence[Kill], ranks: int, come_back: bool = False) -> None:
    """Raise UsageError for a kill of a rank that isn't there, of one that is dead already, or when all ranks die.

    come_back: ranks that die are started anew, and may die again, at another step.
    """
    victims: set[int] = set()
    steps: set[tuple[int, int | None]] = set()
    for kill in kills:
        if kill.rank >= ranks:
            raise UsageError(f"--kill {kill}: there is no such rank; the layout has ranks 0 to {ranks - 1}")
        if kill.rank in victims and (not come_back or (kill.rank, kill.step) in steps):
            raise UsageError(f"--kill {kill}: rank {kill.rank} is killed twice; it dies only once")
        if kill.step == 0 or kill.recovery == 0:
            raise UsageError(f"--kill {kill}: the first step is 1, and so is the first recovery")
        victims.add(kill.rank)
        steps.add((kill.rank, kill.step))
    if len(victims) == ranks and not come_back:
        raise UsageError(f"--kill: all {ranks} ranks would die, and nobody would be left to go on; spare one")
