"""run_campaign: run what a campaign still lacks, on any executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flipper.campaigns.coordinator import Coordinator, Progress
from flipper.campaigns.engines import Engine
from flipper.campaigns.folder import Campaign, Folder
from flipper.campaigns.scratch import scratch
from flipper.campaigns.store import Store
from flipper.errors import UsageError
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
    Raises the first FlipperError; what had finished by then is kept, and the next call goes on from there.
    """
    if shard is not None and campaign.spec.margin is not None:
        raise UsageError(
            "campaign.margin stops a cell by its first trials in order, of which a shard has only some: "
            "give campaign.trials instead, or leave --shard out"
        )
    with scratch(), Store(campaign.folder.results(shard), write=True) as store:
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
        )
        return coordinator.run()


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
