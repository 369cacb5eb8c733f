"""Kinds of faults: bits that flip, or ranks that die; and what in a campaign file goes with which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flipper.errors import UsageError

if TYPE_CHECKING:
    from flipper.campaigns.spec import Spec

BIT_FLIP, RANK_LOSS = "bit-flip", "rank-loss"
FAULTS: Final = (BIT_FLIP, RANK_LOSS)
"""What campaign.fault may be."""


def fault_of(document: Mapping[str, Any]) -> str:
    """What kind of fault the campaign has: a key of [campaign], or an axis, but one kind in all; raises UsageError."""
    parts = document.get("slices", ())
    tables = [document.get("campaign"), document.get("axes"), *(parts if isinstance(parts, list) else ())]
    given = [table["fault"] for table in tables if isinstance(table, dict) and "fault" in table]
    given = [fault[0] if isinstance(fault, list) and len(fault) == 1 else fault for fault in given]
    if wrong := [fault for fault in given if fault not in FAULTS]:
        several = "; bits that flip and ranks that die are campaigns of their own" if isinstance(wrong[0], list) else ""
        raise UsageError(f"campaign.fault must be {' or '.join(map(repr, FAULTS))}, not {wrong[0]!r}{several}")
    if len(set(given)) > 1:
        raise UsageError(f"fault is {given[0]!r} and {given[-1]!r}: one kind in a campaign; make two files of it")
    return str(given[0]) if given else BIT_FLIP


def check_axes(
    where: str, given: Mapping[str, Any], fault: str, of_flips: Sequence[str], of_deaths: Sequence[str]
) -> None:
    """Raise UsageError for axes of the other kind of faults; where: the table that they stand in."""
    other, theirs, ours = (BIT_FLIP, of_flips, of_deaths) if fault == RANK_LOSS else (RANK_LOSS, of_deaths, of_flips)
    for axis in given:
        if axis in theirs and axis not in ours:
            raise UsageError(
                f"{where}: {axis} = {given[axis]!r} goes with campaign.fault = {other!r}, and here that is {fault!r}, "
                f"with the axes {', '.join(ours)}"
            )


def check_keys(spec: Spec) -> None:
    """Raise UsageError for keys of [campaign] that don't go with the kind of its faults."""
    if spec.fault != RANK_LOSS:
        if spec.save_every:
            raise UsageError("campaign.save_every goes with fault = 'rank-loss', for recovery = \"restart\"")
        return
    if not spec.recipe:
        raise UsageError("campaign.fault 'rank-loss' goes with a recipe: flipper starts the ranks that are to die")
    if spec.census:
        raise UsageError("campaign.trials = \"all\" goes with fault = 'bit-flip'; give a number of trials, or a margin")
    if spec.fit is not None:
        raise UsageError(f"campaign.fit = {spec.fit:g} is a rate of bit flips; deaths have the axis mtbf")
    if spec.inject_epoch is not None and spec.inject_step is not None:
        raise UsageError("give campaign.inject_epoch or campaign.inject_step, not both: where trials go on from")
