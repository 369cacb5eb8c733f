"""run_campaign: run what a campaign still lacks, on any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flipper.campaigns.coordinator import Coordinator, Progress
from flipper.campaigns.engines import Engine
from flipper.campaigns.folder import Campaign, Folder, is_written, planned, write
from flipper.campaigns.scratch import scratch
from flipper.campaigns.store import Store, lock_of
from flipper.errors import FlipperError, UsageError
from flipper.training.recipes import user


def run_campaign(
    campaign: Campaign,
    engine: Engine,
    *,
    shard: tuple[int, int] | None = None,
    keep: bool = False,
    audit: float = 0.0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Run golden runs, controls, null trials, trials and audits that have no result yet, and store each as it ends.

    engine: any executor; see engines. Others as for Coordinator.
    Its folder says what the campaign is from the start, or, where it has results already, once there are more.
    Raises the first FlipperError; what had finished by then is kept, and the next call goes on from there.
    """
    if shard is not None and campaign.spec.margin is not None:
        raise UsageError(
            "campaign.margin stops a cell by its first trials in order, of which a shard has only some: "
            "give campaign.trials instead, or leave --shard out"
        )
    results = campaign.folder.results(shard)
    with scratch(), _opened(campaign.folder, results) as store:
        campaign = planned(campaign.spec, campaign.folder.path)
        coordinator = Coordinator(
            _from_anywhere(campaign),
            store,
            engine.executor,
            at_once=engine.at_once,
            shard=shard,
            keep=keep,
            audit=audit,
            lost=engine.lost,
            on_progress=on_progress,
            on_results=_Writing(campaign),
        )
        return coordinator.run()


@contextmanager
def _opened(folder: Folder, results: Path) -> Iterator[Store]:
    """The store to write to; a folder that is made for it is gone again if an error comes before anything else."""
    new = not folder.path.exists()
    try:
        with Store(results, write=True) as store:
            try:
                yield store
            except FlipperError:
                if new:
                    _forget(folder, results)
                raise
    finally:
        if new:
            with suppress(OSError):  # it holds what was made
                folder.path.rmdir()


class _Writing:
    """Writes down what a campaign is: at once, or, where that is to change for results that are there, when called."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._due = not is_written(campaign)
        if not (campaign.folder.campaign.exists() and campaign.folder.has_results):
            self()

    def __call__(self) -> None:
        if self._due:
            write(self._campaign)
            self._due = False


def _forget(folder: Folder, results: Path) -> None:
    """Remove what every run begins with where that is all there is, but for the lock, which goes with the store."""
    with suppress(OSError):
        for home in (*folder.path.glob("golden/*"), folder.path / "golden"):
            home.rmdir()
    with suppress(OSError):
        if set(folder.path.iterdir()) <= {folder.campaign, results, lock_of(results)}:
            folder.campaign.unlink(missing_ok=True)
            results.unlink()


def _from_anywhere(campaign: Campaign) -> Campaign:
    """The campaign with whole paths, since workers are at home elsewhere."""
    spec = campaign.spec
    recipe, data = spec.recipe, spec.data_dir
    if recipe is not None and user.is_meant(recipe):
        recipe = str(Path(recipe).absolute())
    if data is not None:
        data = str(Path(data).absolute())
    folder = Folder(campaign.folder.path.absolute())
    return replace(campaign, folder=folder, spec=replace(spec, recipe=recipe, data_dir=data))
