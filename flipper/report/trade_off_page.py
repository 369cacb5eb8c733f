"""What the page of a sweep over failure rates shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from markupsafe import Markup

from flipper import __version__
from flipper.failstop.break_even import HOUR
from flipper.failstop.sweep import Sweep
from flipper.report.drawing import inlined
from flipper.report.figures import trade_off
from flipper.report.numbers import significant
from flipper.report.page import environment, own
from flipper.report.palette import COLOURS

NAMES: Final = {"overhead_fraction": "overhead", "accuracy_loss": "accuracy loss"}
DRAWERS: Final = {"trade-off": trade_off.draw_trade_off, "by-rate": trade_off.draw_by_rate}
DONE: Final = {
    "restart": "All workers end, start anew, and go on from the last checkpoint with as many as before.",
    "rollback": "The survivors take back the step under way, from a copy in memory, and make it again.",
    "lossy": "They keep what is averaged and applied, finish the rest among themselves, and go on.",
}


def html(sweep: Sweep) -> str:
    """The page."""
    return environment().get_template("trade_off.html.j2").render(context(sweep))


def context(sweep: Sweep) -> dict[str, Any]:
    """What the template shows."""
    crossings = [{**each, "quantity": NAMES[str(each["quantity"])]} for each in sweep.break_evens()]
    return {
        "spec": sweep.spec,
        "seeds": sweep.seeds,
        "draws": len(sweep.points[0].times),
        "figures": inlined(DRAWERS, sweep),
        "points": [point.record() for point in sweep.points],
        "break_evens": crossings,
        "verdict": list(_verdict(crossings)),
        "done": {name: DONE[name] for name in sweep.spec.recoveries},
        "costs": asdict(sweep.spec.costs),
        "hour": HOUR,
        "version": __version__,
        "colours": COLOURS,
        "style": Markup(own("page.css")),
    }


def _verdict(break_evens: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each pair and quantity."""
    for each in break_evens:
        pair = f"{each['strategy'].capitalize()} against {each['against']}, {each['quantity']}:"
        mtbf, low, high = (each[f"break_even_{key}"] for key in ("mtbf_seconds", "low", "high"))
        if mtbf is not None:
            yield f"{pair} they break even at an MTBF of {seconds(mtbf)}{_range(low, high)}; {each['verdict']}."
        elif low is not None:
            yield f"{pair} they break even at an MTBF between {seconds(low)} and {seconds(high)}; {each['verdict']}."
        else:
            yield f"{pair} {each['verdict']}."


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    ends = ("below the sweep" if low is None else seconds(low), "above it" if high is None else seconds(high))
    return f" (95%: {ends[0]} to {ends[1]})"


def seconds(value: float) -> str:
    """A duration for people."""
    return f"{significant(value)} s" if value < 2 * HOUR else f"{significant(value / HOUR)} h"
