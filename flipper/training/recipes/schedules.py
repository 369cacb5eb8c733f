"""Learning rates as functions of the step; each is computed anew from the step, so a resumed run repeats it exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(steps: int, warm_up: int = 0) -> Callable[[Optimizer], LambdaLR]:
    """A linear rise over `warm_up` steps, then half a cosine down to 0 at `steps`; 0 from there on.

    Source: I. Loshchilov and F. Hutter, SGDR (2017), eq. 5, without restarts.
    """

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        share = min(1.0, (step - warm_up) / (steps - warm_up))
        return (1 + math.cos(math.pi * share)) / 2

    return lambda optimizer: LambdaLR(optimizer, factor)


def tenth_at(*steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A tenth of what it was from each of these steps on."""

    def factor(step: int) -> float:
        return float(0.1 ** sum(step >= each for each in steps))

    return lambda optimizer: LambdaLR(optimizer, factor)
