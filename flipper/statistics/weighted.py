"""A proportion over the whole population where the draw took some of it more often than its share.

A spread over layers strikes a bias of 64 elements as often as a kernel of two million; counted plainly, its trials
say how harmful such a draw is, not how harmful a fault in a bit of the whole is. Weights put that right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum, isclose, sqrt

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval, clopper_pearson, wilson
from flipper.statistics.ranges import check_confidence, check_share


def post_stratified(
    strata: Iterable[tuple[float, int, int]], confidence: float = 0.95
) -> tuple[float | None, Interval]:
    """The proportion over a population of strata, each with its share of the population, its hits and its trials.

    To be preferred where each trial has one fault, and so one stratum. The estimate weighs every stratum's
    proportion by its share; strata without trials are taken to be like the rest, but may be anything from 0 to 1 in
    the interval. None and (0, 1) without trials. The interval adds the squares of the distances to the strata's
    Wilson bounds; with one stratum it is Wilson's.
    Raises UsageError unless the shares sum to 1.
    Sources: D. Holt and T. M. F. Smith, J. Royal Statistical Society A 142 (1979) 33-46 (post-stratification); G. Y.
    Zou and A. Donner, Statistics in Medicine 27 (2008) 1693-1702 (the interval).
    """
    check_confidence(confidence)
    counted = list(strata)
    for share, hits, trials in counted:
        check_share("share", share, "certainty", 1)
        check_share("hits", hits, "trials", trials)
    if not isclose(fsum(share for share, _, _ in counted), 1, abs_tol=1e-6):
        raise UsageError(f"shares: they sum to {fsum(share for share, _, _ in counted)}, not to 1")
    drawn = fsum(share for share, _, trials in counted if trials)
    if not drawn:
        return None, Interval(0.0, 1.0)
    estimate = min(1.0, fsum(share * hits / trials for share, hits, trials in counted if trials) / drawn)
    below = above = 0.0
    for share, hits, trials in counted:
        own = hits / trials if trials else estimate
        bounds = wilson(hits, trials, confidence)
        below += (share * (own - bounds.low)) ** 2
        above += (share * (bounds.high - own)) ** 2
    return estimate, Interval(max(0.0, estimate - sqrt(below)), min(1.0, estimate + sqrt(above)))


def weighted_proportion(
    hits: Sequence[bool], weights: Sequence[float], confidence: float = 0.95
) -> tuple[float | None, Interval]:
    """The proportion over the population, from trials with weights.

    weights: per trial, the share of its stratum in the population over the probability with which the draw takes from
    that stratum; for several faults in a trial, the product of theirs. Their expectation is 1.
    The estimate is the sum of the weights of the hits over that of all (Hajek); None and (0, 1) without trials, and
    equal weights give the plain proportion. The interval is Clopper and Pearson's at the effective number of
    trials: the smaller of Kish's, (sum w)^2 / sum w^2, and the one by the estimate's linearised variance, lowered
    again by the mean weight where that is below 1, since then strata of weight went unseen. It errs to the wide side.
    Raises UsageError for weights that are not positive and finite, or not as many as trials.
    Sources: J. Hajek in V. P. Godambe and D. A. Sprott (eds.), Foundations of Statistical Inference (1971) 236; L.
    Kish, Survey Sampling (1965) 11.7; E. L. Korn and B. I. Graubard, Survey Methodology 24 (1998) 193-201 (the
    interval; the lowering by the mean weight is our own).
    """
    check_confidence(confidence)
    if len(hits) != len(weights):
        raise UsageError(f"weights: {len(weights)} for {len(hits)} trials")
    if not all(0 < weight < float("inf") for weight in weights):
        raise UsageError("weights: one is not a positive finite number")
    if not len(hits):
        return None, Interval(0.0, 1.0)
    total = fsum(weights)
    estimate = min(1.0, fsum(weight for hit, weight in zip(hits, weights, strict=True) if hit) / total)
    effective = _effective_trials(hits, weights, estimate) * min(1.0, total / len(hits))
    return estimate, clopper_pearson(estimate * effective, effective, confidence)


def _effective_trials(hits: Sequence[bool], weights: Sequence[float], estimate: float) -> float:
    """Trials of equal weight that would tell as much."""
    total = fsum(weights)
    kish = total**2 / fsum(weight**2 for weight in weights)
    variance = fsum((w * (bool(hit) - estimate)) ** 2 for hit, w in zip(hits, weights, strict=True)) / total**2
    return min(kish, estimate * (1 - estimate) / variance) if variance else kish
