"""Stopping: how many trials a cell needs until its interval is as narrow as the spec asks."""

from __future__ import annotations

from collections.abc import Mapping

from flipper.campaigns.spec import Spec
from flipper.statistics.sequential import Plan


def plan_for(spec: Spec) -> Plan:
    """The group-sequential plan of a campaign with a margin."""
    assert spec.margin is not None
    return Plan.for_margin(spec.margin, spec.confidence)


def finished_prefix(harmful: Mapping[int, bool]) -> list[bool]:
    """The outcomes of trials 0, 1, 2 ... up to the first that is not finished: what ran first must not decide."""
    found: list[bool] = []
    while len(found) in harmful:
        found.append(harmful[len(found)])
    return found


def trials_wanted(plan: Plan, harmful: Mapping[int, bool]) -> int:
    """How many trials the cell needs as far as is known: up to the next look, or none more."""
    decision = plan.decide(finished_prefix(harmful))
    return decision.trials if decision.stop else decision.next_look or plan.maximum
