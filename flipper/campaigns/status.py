"""Status: how far a campaign is, from its folder alone; imports nothing heavy, since shells ask often."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from flipper.campaigns.outcomes import OUTCOMES, band_of, bands, golden_key, outcome_of
from flipper.campaigns.spec import Spec
from flipper.campaigns.store import Store
from flipper.errors import UsageError


def status(path: Path) -> dict[str, Any]:
    """The campaign in a folder: trials done and planned, outcomes so far, who is at work, and the seconds left.

    Of shards that aren't merged yet, all together. Raises UsageError when the folder is no campaign's.
    """
    try:
        document = json.loads((path / "campaign.json").read_text("utf-8"))
        spec = Spec.from_record(document["spec"])
        planned = sum(int(cell["trials"]) for cell in document["cells"])
    except FileNotFoundError:
        raise UsageError(f"{path} is no campaign's folder: it has no campaign.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path / 'campaign.json'} is damaged: {error}") from error
    outcomes: Counter[str] = Counter()
    done, seconds, null_trials = set(), 0.0, 0
    running: list[str] = []
    for database in sorted(path.glob("results*.sqlite")):
        with Store(database) as store:
            goldens = {golden_key(run): run for run in store.runs("golden")}
            nulls = list(store.runs("null"))
            found = bands(spec, nulls, goldens)
            null_trials += len(nulls)
            seconds += float(store.facts().get("seconds", 0.0))
            for run in store.runs("trial"):
                if (run.cell, run.trial) not in done:
                    done.add((run.cell, run.trial))
                    band = band_of(spec, found, run.parallel)
                    outcomes[outcome_of(run, goldens[golden_key(run)], band, spec)] += 1
        running += _holder(database.with_name(f"{database.name}.lock"))
    return {
        "name": spec.name,
        "trials": len(done),
        "planned": planned if not spec.census and spec.margin is None else None,
        "null_trials": null_trials,
        "outcomes": {name: outcomes[name] for name in OUTCOMES if outcomes[name]},
        "running": running,
        "seconds": round(seconds, 1),
    }


def _holder(lock: Path) -> list[str]:
    """Who writes, by its lock."""
    try:
        holder = json.loads(lock.read_text("utf-8"))
        return [f"process {holder['process']} on {holder['host']}"]
    except (OSError, ValueError, KeyError):
        return []
