"""open_engine: the engine of a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from flipper.campaigns.engines.engine import Engine
from flipper.campaigns.folder import Campaign
from flipper.errors import UsageError

NAMES: Final = ("local", "dask", "slurm")


@contextmanager
def open_engine(
    name: str, workers: int | None = None, scheduler: str | None = None, *, campaign: Campaign | None = None
) -> Iterator[Engine]:
    """The engine of a name, closed at the end; after an error it ends what still runs.

    workers: ranks at once here, or runs at once on a cluster. scheduler: address of the dask cluster. campaign: says
    with slurm where jobs have their files, and what they ask for.
    Raises UsageError for options that don't go with it, FlipperError when it can't be reached.
    """
    if (scheduler is not None) != (name == "dask"):
        raise UsageError("--scheduler ADDRESS goes with --engine dask, and that needs it")
    if name == "local":
        from flipper.campaigns.engines.local import local_engine

        with local_engine(workers) as engine:
            yield engine
    elif name == "dask":
        from flipper.campaigns.engines.dask import dask_engine

        assert scheduler is not None
        with dask_engine(scheduler, workers) as engine:
            yield engine
    elif name == "slurm":
        from flipper.campaigns.engines.slurm import slurm_engine

        if campaign is None:
            raise UsageError("open_engine('slurm') needs the campaign: its folder holds the jobs' files")
        with slurm_engine(campaign, workers) as engine:
            yield engine
    else:
        raise UsageError(f"no engine {name!r}; known: {', '.join(NAMES)}")
