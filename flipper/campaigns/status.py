"""Status: how far a campaign is, from its folder alone; imports nothing heavy, since shells ask often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flipper.campaigns.outcomes import OUTCOMES, band_of, bands, golden_key, outcome_of
from flipper.campaigns.owners import Owner
from flipper.campaigns.record import RunRecord
from flipper.campaigns.settled import read_settled
from flipper.campaigns.spec import Spec
from flipper.campaigns.store import Store, lock_of


def status(path: Path) -> dict[str, Any]:
    """The campaign in a folder: trials done and planned, outcomes so far, who is at work, and the seconds left.

    Of shards that aren't merged yet, all together. Raises UsageError when the folder is no campaign's.
    """
    spec, cells = read_settled(path / "campaign.json")
    planned = sum(cell["trials"] for cell in cells)
    databases = sorted(path.glob("results*.sqlite"), key=lambda each: (each.name != "results.sqlite", each.name))
    outcomes, null_trials, seconds = _read(spec, databases)
    holders = (Owner.read(lock_of(each)) for each in databases)
    counted = Counter(outcomes)
    return {
        "name": spec.name,
        "trials": len(outcomes),
        "planned": planned if not spec.census and spec.margin is None else None,
        "null_trials": null_trials,
        "outcomes": {name: counted[name] for name in OUTCOMES if counted[name]},
        "running": [str(holder) for holder in holders if holder is not None and not holder.gone],
        "seconds": round(seconds, 1),
    }


def _read(spec: Spec, databases: Sequence[Path]) -> tuple[list[str], int, float]:
    """The outcome of each trial, the number of null trials, and the seconds that the campaign has run.

    Trials are judged as they are read, and one database is open at a time, since there may be very many of both.
    """
    goldens: dict[Any, RunRecord] = {}
    nulls: dict[Any, RunRecord] = {}
    seconds: dict[str, float] = {}
    merged: set[str] = set()
    for database in databases:
        with Store(database) as store:
            goldens.update((golden_key(run), run) for run in store.runs("golden"))
            for null in store.runs("null"):
                nulls.setdefault((null.parallel, null.checkpoint, null.settings, null.trial), null)
            facts = store.facts()
        seconds[str(database.resolve())] = float(facts.get("seconds", 0.0))
        merged |= facts.get("merged", {}).keys()
    found = bands(spec, nulls.values(), goldens)
    outcomes: dict[tuple[int, int], str] = {}
    for database in databases:
        with Store(database) as store:
            for run in store.runs("trial"):
                golden = goldens.get(golden_key(run))  # None where both have come since those were read
                if golden is not None and (run.cell, run.trial) not in outcomes:
                    outcomes[run.cell, run.trial] = outcome_of(run, golden, band_of(spec, found, run.parallel), spec)
    return list(outcomes.values()), len(nulls), sum(seconds[each] for each in seconds.keys() - merged)
