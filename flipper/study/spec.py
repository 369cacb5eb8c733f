"""What a study of checkpoints is asked to measure; plain values that can be sent to another process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flipper.errors import UsageError
from flipper.study.formats import FORMATS
from flipper.training import recipes
from flipper.training.layouts import DATA, MODEL, SINGLE, Parallel
from flipper.training.spec import LONGEST_TIMEOUT

CONTENTS: Final = ("parameters", "model", "optimizer", "all")
"""What a checkpoint holds: parameters alone; with buffers; with the optimizer's state; with schedule, progress, RNG."""

MODES: Final = ("sync", "async")
FSYNCS: Final = ("no", "yes")

WHOLE_FILE: Final = "one file"
SHARDS: Final = "a shard a rank"

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_LARGEST: Final = 1 << 44


@dataclass(frozen=True)
class Combination:
    """One row: a format, a content, a number of ranks, a mode, and whether saving waits for the disk."""

    format: str
    content: str
    ranks: int
    mode: str
    fsync: bool

    @property
    def layout(self) -> str:
        """Whether rank 0 writes one file, or each rank what it holds."""
        return SHARDS if FORMATS[self.format].sharded else WHOLE_FILE

    def __str__(self) -> str:
        synced = " with fsync" if self.fsync else ""
        return f"{self.format}, {self.content}, {self.ranks} ranks, {self.mode}{synced}"


@dataclass(frozen=True)
class StudySpec:
    """A study.

    recipe, source, synthetic: exactly one: a recipe that is trained; a checkpoint that is read; bytes of parameters
    that are made up, with Adam's two moments beside them.
    kind: the layout of more ranks than one, without their number.
    repeat: how often each save and load is measured. mtbf: seconds between failures of the job, for the interval.
    folder: where checkpoints are written, so that its disk is measured; None for the system's temporary folder.
    """

    recipe: str | None = None
    source: Path | None = None
    synthetic: int | None = None
    formats: tuple[str, ...] = ("pytorch", "safetensors", "hdf5", "hdf5-gzip", "npz", "dcp")
    contents: tuple[str, ...] = ("all",)
    ranks: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = ("sync",)
    fsyncs: tuple[str, ...] = ("no",)
    kind: str = "fsdp"
    repeat: int = 5
    mtbf: float | None = None
    seed: int = 0
    folder: Path | None = None
    data_dir: Path | None = None
    device: str = "auto"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        given = [each for each in (self.recipe, self.source, self.synthetic) if each is not None]
        if len(given) != 1:
            raise UsageError("say what to save: a RECIPE, --from CKPT or --synthetic SIZE, one of them")
        if self.recipe is not None:
            recipes.check_name(self.recipe)
        for option, values, known in (
            ("--formats", self.formats, tuple(FORMATS)),
            ("--content", self.contents, CONTENTS),
            ("--mode", self.modes, MODES),
            ("--fsync", self.fsyncs, FSYNCS),
        ):
            _check_names(option, values, known)
        kinds = (*(kind for kind in DATA if kind != "mpi"), *MODEL)
        _check_names("--parallel", (self.kind,), kinds)
        if not self.ranks or len({*self.ranks}) < len(self.ranks) or min(self.ranks) < 1:
            raise UsageError(f"--ranks {_listed(self.ranks)}: numbers of at least 1, each once")
        if self.repeat < 1:
            raise UsageError(f"--repeat {self.repeat}: must be 1 or more")
        if self.mtbf is not None and not 0 < self.mtbf < math.inf:
            raise UsageError(f"--mtbf {self.mtbf}: must be above 0")
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UsageError(f"--timeout must be above 0 and at most {LONGEST_TIMEOUT:g} seconds, not {self.timeout}")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed must be 0 to 2**64 - 1, not {self.seed}")
        if self.folder is not None and not self.folder.is_dir():
            raise UsageError(f"--folder {self.folder}: there is no such folder")
        for ranks in self.ranks:
            if not any(self.combinations(ranks)):
                raise UsageError(
                    f"nothing to measure: of {_listed(self.formats)}, none is saved asynchronously; "
                    f"{_listed([name for name in FORMATS if FORMATS[name].asynchronous])} is"
                )

    def combinations(self, ranks: int) -> Iterator[Combination]:
        """The rows of a number of ranks. Formats that have no asynchronous save have no such row."""
        for content in self.contents:
            for name in self.formats:
                for mode in self.modes:
                    if mode == "sync" or FORMATS[name].asynchronous:
                        for fsync in self.fsyncs:
                            yield Combination(name, content, ranks, mode, fsync == "yes")

    def never_async(self) -> list[str]:
        """The formats that were asked for in the background, and can't be saved so."""
        return [name for name in self.formats if "async" in self.modes and not FORMATS[name].asynchronous]

    def parallel(self, ranks: int) -> Parallel:
        """The layout of so many ranks."""
        return SINGLE if ranks == 1 else Parallel.parse(f"{self.kind}:{ranks}")


def _check_names(option: str, values: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [value for value in values if value not in known]:
        raise UsageError(f"{option} {unknown[0]!r}: known are {', '.join(known)}")
    if not values or len({*values}) < len(values):
        raise UsageError(f"{option} {_listed(values)!r}: names from {', '.join(known)}, each once")


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


def bytes_of(text: str, option: str) -> int:
    """A size: a number of bytes, or one with k, M, G, T or Ki, Mi, Gi, Ti and B. UsageError for another."""
    found = _SIZE.fullmatch(text.strip())
    size = 0.0
    if found is not None:
        unit = (found[2] or "").lower()
        size = float(found[1]) * (1024 if unit.endswith("i") else 1000) ** (" kmgt".index(unit[0]) if unit else 0)
    if not 4 <= size <= _LARGEST:
        raise UsageError(f"{option} {text!r} is no size of at least 4 bytes: say 100MB, 1GiB")
    return int(size)
