"""Recoveries in words: how they compare where ranks die, in words that claim no more than the numbers do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from markupsafe import Markup

from flipper.campaigns.deaths import POINT
from flipper.campaigns.results import Trial
from flipper.report.material import Material, described
from flipper.report.numbers import exact, number_, p_, points, points_, significant

Numbers = Mapping[str, Any]

MOST: Final = 6
"""Differences that the first lines name; the table has all."""


def in_points(material: Material) -> bool:
    """Whether the metric is a share, whose differences are said in percentage points."""
    return material.spec.metric == "accuracy"


def amount(material: Material, value: float | None) -> str:
    """A difference of the metric, in its unit."""
    return f"{points(value)} points" if in_points(material) else significant(value)


def amount_(material: Material, value: float | None) -> Markup:
    """The same for the page, without its unit."""
    return points_(value) if in_points(material) else exact(significant(value), value)


def setting_text(material: Material, each: Numbers) -> str:
    """The setting that a recovery was tried in, as far as settings differ: `ddp:4, mtbf 30`."""
    rest = described(each["setting"], [axis for axis in material.varied if axis in each["setting"]])
    return f"{each['setting']['parallel']}, {rest}" if rest else str(each["setting"]["parallel"])


def of_setting(material: Material, each: Numbers) -> Iterator[Trial]:
    """The trials of a recovery in a setting."""
    for trial in material.results.trials:
        axes = trial.cell.axes
        mine = {axis: value for axis, value in axes.items() if axis not in ("recovery", *POINT)}
        if mine == each["setting"] and axes["recovery"] == each["recovery"]:
            yield trial


def told(material: Material, each: Numbers) -> bool:
    """Whether a difference was shown: by the test, after Holm's correction, and by the interval."""
    apart = each["low"] is not None and not each["low"] <= 0 <= each["high"]
    return bool(apart and each["p_holm"] <= 1 - material.spec.confidence)


def verdict(material: Material) -> Markup:
    """One sentence on harm, one on accuracy."""
    known = [each for each in material.numbers["strategies"] if each["trials"]]
    if not known:
        return Markup("Nothing can be said yet: no trial is finished.")
    sentences = [_harm(material, known)]
    if len({each["recovery"] for each in known}) == 1:
        sentences.append(Markup("One recovery was tested, {}.").format(known[0]["recovery"]))
    else:
        sentences.append(_accuracy(material))
    return Markup(" ").join(sentences)


def _harm(material: Material, known: list[Numbers]) -> Markup:
    harmful, trials = (sum(each[name] for each in known) for name in ("harmful", "trials"))
    if not harmful:
        return Markup("No trial of {} came to harm, under any recovery.").format(number_(trials))
    each_one = Markup(", ").join(
        Markup("{} {} of {}").format(_name(material, known, each), number_(each["harmful"]), number_(each["trials"]))
        for each in known
    )
    return Markup("Harmed: {}.").format(each_one)


def _name(material: Material, known: list[Numbers], each: Numbers) -> str:
    several = len({setting_text(material, other) for other in known}) > 1
    return f"{each['recovery']} ({setting_text(material, each)})" if several else str(each["recovery"])


def _accuracy(material: Material) -> Markup:
    compared = [each for each in material.numbers["differences"] if each["measure"] == "accuracy_loss"]
    shown = [each for each in compared if told(material, each)]
    if not shown:
        return Markup("No difference in lost {} between recoveries was shown.").format(material.spec.metric)
    several = len({setting_text(material, each) for each in compared}) > 1
    parts = [
        Markup("{} lost more than {}{}").format(
            *((each["a"], each["b"]) if each["difference"] > 0 else (each["b"], each["a"])),
            f" under {setting_text(material, each)}" if several else "",
        )
        for each in shown
    ]
    return Markup("Of {}, {}.").format(material.spec.metric, Markup("; ").join(parts))


def grounds(material: Material) -> Iterator[Markup]:
    """What the verdict stands on: how trials ended, the most accuracy lost, and which differences were shown."""
    known = [each for each in material.numbers["strategies"] if each["trials"]]
    if known:
        yield _endings(known)
    if losses := [each for each in known if each["accuracy_loss"]["low"] is not None]:
        yield _largest(material, losses)
    for measure, what in (("accuracy_loss", f"{material.spec.metric} lost"), ("overhead_fraction", "overhead")):
        compared = [each for each in material.numbers["differences"] if each["measure"] == measure]
        if compared:
            yield _shown(material, compared, what)


def _endings(known: list[Numbers]) -> Markup:
    parts = []
    for recovery in dict.fromkeys(each["recovery"] for each in known):
        mine = [each for each in known if each["recovery"] == recovery]
        trials, harmful, same = (sum(each[name] for each in mine) for name in ("trials", "harmful", "identical"))
        parts.append(
            Markup("{}: of {} trials {} harmful, {} equal to their golden run bit for bit").format(
                recovery, number_(trials), number_(harmful), number_(same)
            )
        )
    return Markup("; ").join(parts) + "."


def _largest(material: Material, losses: list[Numbers]) -> Markup:
    """The largest mean loss, and how far up the intervals reach."""
    most = max(losses, key=lambda each: float(each["accuracy_loss"]["mean"]))
    reach = max(each["accuracy_loss"]["high"] for each in losses)
    return Markup("Largest mean loss of {}: {}{}, {} under {}; no {} interval of a mean reaches above {}.").format(
        material.spec.metric, _with_unit(material, most["accuracy_loss"]["mean"]),
        _interval(material, most["accuracy_loss"], amount_), most["recovery"], setting_text(material, most),
        material.confidence, _with_unit(material, reach),
    )  # fmt: skip


def _shown(material: Material, compared: list[Numbers], what: str) -> Markup:
    """How many comparisons show a difference, and the first of them."""
    shown = [each for each in compared if told(material, each)]
    said = Markup("In {}, {} of {} comparisons of recoveries over the same deaths show a difference").format(
        what, number_(len(shown)), number_(len(compared))
    )
    if not shown:
        return said + "."
    parts = Markup("; ").join(_pair(material, each) for each in shown[:MOST])
    return Markup("{}{}: {}.").format(said, Markup(", such as") if len(shown) > MOST else "", parts)


def _with_unit(material: Material, value: float | None) -> Markup:
    return amount_(material, value) + (" points" if in_points(material) else "")


def _interval(material: Material, each: Numbers, say: Any) -> Markup:
    if each["low"] is None:
        return Markup("")
    return Markup(" ({} to {})").format(say(material, each["low"]), say(material, each["high"]))


def _pair(material: Material, each: Numbers) -> Markup:
    loss = each["measure"] == "accuracy_loss"
    return Markup("{} \u2212 {} under {} {}{}, p = {}").format(
        each["a"], each["b"], setting_text(material, each),
        _with_unit(material, each["difference"]) if loss else points_(each["difference"]) + " points",
        _interval(material, each, amount_ if loss else lambda _, value: points_(value)), p_(each["p_holm"]),
    )  # fmt: skip
