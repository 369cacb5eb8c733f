"""Status: how far a campaign is, from its folder alone; imports nothing heavy, since shells ask often."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from flipper.campaigns.outcomes import OUTCOMES, band_of, bands, golden_key, outcome_of
from flipper.campaigns.owners import Owner
from flipper.campaigns.record import RunRecord
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
    goldens: dict[Any, RunRecord] = {}
    nulls: dict[Any, RunRecord] = {}
    runs: dict[tuple[int, int], RunRecord] = {}
    running: list[str] = []
    merged: set[str] = set()
    seconds = 0.0
    for database in sorted(path.glob("results*.sqlite"), key=lambda each: (each.name != "results.sqlite", each.name)):
        with Store(database) as store:
            goldens.update((golden_key(run), run) for run in store.runs("golden"))
            for null in store.runs("null"):
                nulls.setdefault((null.parallel, null.checkpoint, null.settings, null.trial), null)
            for run in store.runs("trial"):
                runs.setdefault((run.cell, run.trial), run)
            facts = store.facts()
        merged |= facts.get("merged", {}).keys()
        if str(database.resolve()) not in merged:
            seconds += float(facts.get("seconds", 0.0))
        holder = Owner.read(database.with_name(f"{database.name}.lock"))
        if holder is not None and not holder.gone:
            running.append(str(holder))
    found = bands(spec, nulls.values(), goldens)
    judged = (
        outcome_of(run, goldens[golden_key(run)], band_of(spec, found, run.parallel), spec) for run in runs.values()
    )
    outcomes = Counter(judged)
    return {
        "name": spec.name,
        "trials": len(runs),
        "planned": planned if not spec.census and spec.margin is None else None,
        "null_trials": len(nulls),
        "outcomes": {name: outcomes[name] for name in OUTCOMES if outcomes[name]},
        "running": running,
        "seconds": round(seconds, 1),
    }
