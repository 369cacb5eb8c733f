"""Answer: how the layouts compare, in words that claim no more than the numbers do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from flipper.errors import UsageError
from flipper.report import recoveries
from flipper.report.material import Material
from flipper.report.numbers import number_, p_, percent_, points_
from flipper.training.layouts import Parallel

Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The first lines of the page: the verdict, then what it stands on."""

    verdict: Markup
    grounds: list[Markup]


def answer(material: Material) -> Answer:
    """The answer to the primary question, as far as there is one."""
    if material.results.lose_ranks:
        return Answer(recoveries.verdict(material), list(recoveries.grounds(material)))
    main = material.numbers["primary"]
    if main["a"] is None:
        return Answer(_no_pair(material), [])
    if not main["pairs"]:
        return Answer(
            Markup("Nothing can be said yet: no trial under {} has its partner under {}.").format(
                _who(main["a"]), _who(main["b"])
            ),
            [],
        )
    grounds = [_difference(material, main), _equivalence(material, main), *_seeds(material, main["over_seeds"])]
    return Answer(_verdict(material, main), grounds)


def _no_pair(material: Material) -> Markup:
    if len(material.layouts) == 1:
        return Markup("One layout was tested, {}: this campaign says nothing on how layouts differ.").format(
            _who(material.layouts[0])
        )
    return Markup(
        "The layouts tested ({}) are not one only data-parallel and one only model-parallel, so this campaign has no "
        "answer to how the two differ; campaign.contrast can name two layouts."
    ).format(", ".join(material.layouts))


def shown(main: Numbers, confidence: float) -> bool | None:
    """Whether a difference was shown: the exact test and the interval both say so; None where they disagree."""
    by_test = bool(main["p"] <= 1 - confidence)
    by_interval = bool(main["low"] > 0 or main["high"] < 0)
    return by_test if by_test == by_interval else None


def _verdict(material: Material, main: Numbers) -> Markup:
    a, b = _who(main["a"]), _who(main["b"])
    more, less = (a, b) if main["difference"] > 0 else (b, a)
    difference = shown(main, material.spec.confidence)
    words = {"a": a, "b": b, "more": more, "less": less, "margin": material.margin}
    if difference and main["equivalent"]:
        text = (
            "Harm was more frequent under {more} than under {less}, but the difference is smaller than the margin of "
            "{margin} percentage points: within it, the two are equivalent."
        )
    elif difference:
        text = "Harm was more frequent under {more} than under {less}."
    elif main["equivalent"]:
        text = "{a} and {b} are equivalent within the margin of {margin} percentage points."
    elif difference is None:
        text = (
            "Whether {a} and {b} differ is at the edge of what these trials can tell: the exact test and the interval "
            "disagree."
        )
    else:
        text = (
            "No difference between {a} and {b} was shown, and none was ruled out either: one beyond the margin of "
            "{margin} percentage points remains possible."
        )
    sentence = Markup(text).format(**words)
    return Markup(sentence[:1].upper()) + sentence[1:]


def _difference(material: Material, main: Numbers) -> Markup:
    pairs = main["pairs"]
    return Markup(
        "Harmful (not benign) were {} of {} trials ({}) under {} and {} ({}) under {}: a difference of {} percentage "
        "points ({} interval {} to {}; p = {}, exact test over {} draws; {} pairs)."
    ).format(
        main["both"] + main["only_a"], pairs, percent_((main["both"] + main["only_a"]) / pairs), main["a"],
        main["both"] + main["only_b"], percent_((main["both"] + main["only_b"]) / pairs), main["b"],
        points_(main["difference"]), material.confidence, points_(main["low"]), points_(main["high"]), p_(main["p"]),
        number_(main["draws"]), number_(pairs),
    )  # fmt: skip


def _equivalence(material: Material, main: Numbers) -> Markup:
    told = Markup("Equivalence within {} points is {} (two one-sided tests, p = {}).").format(
        material.margin, "shown" if main["equivalent"] else "not shown", p_(main["equivalence_p"])
    )
    if main["low"] <= 0 <= main["high"] and not main["equivalent"]:
        told += Markup(" An interval that holds zero is no proof that there is no difference.")
    return told


def _seeds(material: Material, seeds: Numbers) -> list[Markup]:
    values = Markup(", ").join(
        Markup("{} (seed {})").format(points_(value), seed) for seed, value in seeds["values"].items()
    )
    if seeds["one_run"]:
        return [
            Markup(
                "All trials go on from one training run ({}), so this speaks of that training run; how much another "
                "training seed would differ is not known."
            ).format("training seed " + next(iter(seeds["values"])))
        ]
    told = Markup("Differences by training seed, in points: {}; mean {}").format(values, points_(seeds["mean"]))
    if seeds["deviation"]:
        told += Markup(", standard deviation between seeds {}, {} interval over seeds {} to {}.").format(
            number_(100 * seeds["deviation"]), material.confidence, points_(seeds["low"]), points_(seeds["high"])
        )
    else:
        told += Markup("; {} seeds alike are too few to say how much others would differ.").format(len(seeds["values"]))
    return [told]


def _who(name: str) -> Markup:
    """A layout by name, with what kind it is where that can be told."""
    try:
        layout = Parallel.parse(name)
    except UsageError:
        return Markup("{}").format(name)
    if (layout.data is None) == (layout.model is None):
        return Markup("{}").format(name)
    return Markup("{}-parallel training ({})").format("data" if layout.data is not None else "model", name)


def progress(material: Material) -> Markup:
    """How many trials this is from, and whether some are to come."""
    spec, done = material.spec, len(material.results.trials)
    planned = sum(cell.trials for cell in material.campaign.cells)
    told = Markup("{} trials in {} cells").format(number_(done), number_(len(material.campaign.cells)))
    if spec.census or spec.margin is not None or done >= planned:
        return told
    return told + Markup(", of {} planned: <strong>the campaign is not finished</strong>").format(number_(planned))
