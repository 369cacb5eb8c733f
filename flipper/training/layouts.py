"""Names of parallel layouts: `single`, `ddp:2`, `ddp:2+pipeline:2`, read into the kind and number on each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flipper.errors import UsageError

DATA: Final = ("ddp", "hooks", "fsdp", "mpi")
"""Ways to share the batch: replicas averaged by DDP, tensor by tensor, or by MPI; and FSDP's shards."""

MODEL: Final = ("tensor", "pipeline", "pipeline-1f1b")
"""Ways to share the model."""

PAIRS: Final = (("fsdp", "tensor"), ("ddp", "pipeline"), ("ddp", "pipeline-1f1b"))
"""What may be joined by `+`."""

MAX_RANKS: Final = 1024

_KNOWN = ", ".join(
    ("single", *(f"{kind}:N" for kind in DATA + MODEL), *(f"{data}:N+{model}:N" for data, model in PAIRS))
)


@dataclass(frozen=True)
class Parallel:
    """A layout: how many replicas (or shards) share the batch, how many ranks share the model, and how each.

    data, model: of DATA and MODEL, None for an axis that isn't there (its size is then 1).
    """

    data: str | None = None
    data_size: int = 1
    model: str | None = None
    model_size: int = 1

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """Read a layout's name; UsageError says what is allowed."""
        if text == "single":
            return cls()
        axes = [_axis(part, text) for part in text.split("+")]
        kinds = tuple(kind for kind, _ in axes)
        if (len(axes) == 2 and kinds not in PAIRS) or len(axes) > 2:
            raise UsageError(f"no layout {text!r}; known: {_KNOWN}")
        sizes = dict(axes)
        data, model = (next((kind for kind in kinds if kind in of), None) for of in (DATA, MODEL))
        found = cls(data, sizes.get(data or "", 1), model, sizes.get(model or "", 1))
        if found.ranks > MAX_RANKS:
            raise UsageError(f"layout {text!r} has {found.arithmetic} ranks; at most {MAX_RANKS}")
        return found

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.data_size * self.model_size

    @property
    def arithmetic(self) -> str:
        """How that number comes about."""
        both = self.data is not None and self.model is not None
        return f"{self.data_size} x {self.model_size} = {self.ranks}" if both else str(self.ranks)

    @property
    def pipelined(self) -> bool:
        """Whether each rank holds a stage of the model."""
        return self.model is not None and self.model.startswith("pipeline")

    @property
    def parted(self) -> bool:
        """Whether no rank holds the whole state."""
        return self.ranks > 1 and (self.model is not None or self.data == "fsdp")

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold the same element, each its own copy of it and of its optimizer's state."""
        return self.data in ("ddp", "hooks", "mpi") and self.data_size > 1

    def __str__(self) -> str:
        axes = ((self.data, self.data_size), (self.model, self.model_size))
        return "+".join(f"{kind}:{size}" for kind, size in axes if kind) or "single"


SINGLE: Final = Parallel()
"""One rank that holds everything."""


def _axis(part: str, whole: str) -> tuple[str, int]:
    kind, _, count = part.partition(":")
    if kind not in DATA + MODEL or ":" not in part:
        raise UsageError(f"no layout {whole!r}; known: {_KNOWN}")
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= MAX_RANKS):
        raise UsageError(f"layout {whole!r}: the number of ranks must be 1 to {MAX_RANKS}; known: {_KNOWN}")
    return kind, int(count)
