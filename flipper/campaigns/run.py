"""run_campaign: run what a campaign still lacks, on any executor."""

from __future__ import annotations

import multiprocessing.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flipper.campaigns.coordinator import Coordinator, Progress
from flipper.campaigns.engines import Engine
from flipper.campaigns.folder import Campaign
from flipper.campaigns.store import Store


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

    engine: any executor; see engines.open_engine. Others as for Coordinator.
    Raises the first FlipperError; what had finished by then is kept, and the next call goes on from there.
    """
    with _scratch(), Store(campaign.folder.results(shard), write=True) as store:
        return Coordinator(
            campaign,
            store,
            engine.executor,
            at_once=engine.at_once,
            shard=shard,
            keep=keep,
            audit=audit,
            lost=engine.lost,
            on_progress=on_progress,
        ).run()


@contextmanager
def _scratch() -> Iterator[None]:
    """A folder for all temporary files of this process, which goes with it even when its threads are cut off."""
    multiprocessing.util.get_temp_dir()  # multiprocessing's own must outlast this one
    usual = tempfile.tempdir
    folder = tempfile.mkdtemp(prefix="flipper-campaign-")
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = usual
        shutil.rmtree(folder, ignore_errors=True)
