"""run_again: one trial of a campaign by itself, judged as the campaign would."""

from __future__ import annotations

from typing import Any

from flipper.campaigns.fault_kinds import RANK_LOSS
from flipper.campaigns.folder import Campaign
from flipper.campaigns.outcomes import band_of, bands, golden_key, judge
from flipper.campaigns.record import RunRecord
from flipper.campaigns.runner import run_trial
from flipper.campaigns.store import Store
from flipper.errors import UsageError


def run_again(campaign: Campaign, cell: int, number: int, *, full: bool = False, keep: bool = False) -> dict[str, Any]:
    """Run a trial and say what it comes to, and whether the stored result, if there is one, is the same.

    Raises UsageError for a cell or trial that the campaign doesn't have.
    """
    chosen = campaign.cell(cell)
    if number >= chosen.trials and not campaign.spec.census and campaign.spec.margin is None:
        raise UsageError(f"cell {cell} has trials 0 to {chosen.trials - 1}, not {number}")
    golden, _, run = run_trial(campaign, chosen, number, full, keep)
    stored, nulls = None, []
    if campaign.folder.results().exists():
        with Store(campaign.folder.results()) as store:
            nulls = list(store.runs("null"))
            stored = next((r for r in store.runs("trial") if (r.cell, r.trial) == (cell, number)), None)
    goldens = {golden_key(golden): golden}
    band = band_of(campaign.spec, bands(campaign.spec, nulls, goldens), run.parallel)
    judgement = judge(run, golden, band, campaign.spec)
    return {
        "cell": cell,
        **chosen.axes,
        "trial": number,
        "training_seed": run.training_seed,
        "seed": run.seed,
        "outcome": judgement.outcome,
        "group": judgement.group,
        "metric_final": run.metric,
        "metric_golden": golden.metric,
        "loss_final": run.loss,
        "struck": run.struck,
        **({"kills": run.deaths, "lost": run.lost, "world_size": run.world_size, "steps_again": run.steps_again}
           if campaign.spec.fault == RANK_LOSS else {}),
        "state_digest": run.state_digest,
        "as_stored": None if stored is None else _came_to(stored) == _came_to(run),
        "kept": str(campaign.folder.trial(cell, number)) if keep else None,
        "error": run.error,
    }


def _came_to(run: RunRecord) -> str:
    """What is the same for the same run; NaN equals NaN."""
    return repr((run.ended, run.loss, run.metric, run.state_digest))
