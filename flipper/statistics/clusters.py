"""Paired comparisons in which several pairs come from one draw, and so are not independent.

Trials of nested doses share their faults, and one run is paired with several layouts. Taken for independent, such
pairs promise more than they hold: with four doses whose outcomes mostly agree, an interval of 95 % held 70 % in
simulation. A cluster is all pairs of one draw; draws are independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from flipper.errors import UsageError
from flipper.statistics.intervals import Interval
from flipper.statistics.paired import Stratum, check_counts, check_margin, pooled, score, score_bound
from flipper.statistics.ranges import check_confidence


def design_effect(clusters: Iterable[Stratum]) -> float:
    """How many clustered pairs tell as much as one independent pair: from 1 to about the pairs in a cluster.

    The variance of the difference by clusters over that by pairs, at least 1. Where all pairs say the same it can't
    be seen, and is the clusters' size (averaged by pairs): the most that it can be.
    Source: J. N. K. Rao and A. J. Scott, Biometrics 48 (1992) 577-585.
    """
    kept = [cluster for cluster in clusters if cluster[2]]
    only_a, only_b, pairs = pooled(kept)
    if len(kept) < 2:
        return float(max(pairs, 1))
    mean = (only_a - only_b) / pairs
    by_pairs = only_a + only_b - (only_a - only_b) * mean
    by_clusters = sum((a - b - size * mean) ** 2 for a, b, size in kept) * len(kept) / (len(kept) - 1)
    return max(1.0, by_clusters / by_pairs) if by_pairs > 0 else sum(size**2 for _, _, size in kept) / pairs


def clustered_difference(clusters: Iterable[Stratum], confidence: float = 0.95) -> tuple[float | None, Interval]:
    """The proportion under A minus that under B over all pairs, and a score interval that holds under clustering.

    clusters: each the pairs in which only A and only B had the outcome, and all its pairs.
    Tango's interval with all counts divided by the design effect, and Student's quantile at one degree of freedom
    less than there are clusters; (-1, 1) with fewer than two clusters. Nearly paired_difference where each is one pair.
    Sources: Rao and Scott (1992) for the division; T. Tango, Statistics in Medicine 17 (1998) 891-908.
    """
    from scipy.special import stdtrit

    check_confidence(confidence)
    kept = [cluster for cluster in clusters if cluster[2]]
    only_a, only_b, pairs = pooled(kept)
    estimate = (only_a - only_b) / pairs if pairs else None
    if len(kept) < 2:
        return estimate, Interval(-1.0, 1.0)
    quantile = -float(stdtrit(len(kept) - 1, (1 - confidence) / 2))
    effect = design_effect(kept)
    a, b, all_pairs = only_a / effect, only_b / effect, pairs / effect
    return estimate, Interval(score_bound(a, b, all_pairs, quantile), -score_bound(b, a, all_pairs, quantile))


def clustered_equivalence_p(clusters: Iterable[Stratum], margin: float) -> float:
    """P value of "the proportions under A and B differ by `margin` or more"; 1 with fewer than two clusters."""
    from scipy.special import stdtr

    check_margin(margin)
    kept = [cluster for cluster in clusters if cluster[2]]
    if len(kept) < 2:
        return 1.0
    effect = design_effect(kept)
    a, b, pairs = (count / effect for count in pooled(kept))
    return float(stdtr(len(kept) - 1, -min(score(a, b, pairs, -margin), score(b, a, pairs, -margin))))


def clustered_equivalent(clusters: Iterable[Stratum], margin: float, alpha: float = 0.05) -> bool:
    """Whether A and B are shown to differ by less than `margin`.

    The same as: the interval of clustered_difference at confidence 1 - 2 alpha lies within -margin and +margin.
    """
    check_confidence(1 - 2 * alpha)
    return clustered_equivalence_p(clusters, margin) < alpha


def sign_flip_exact(clusters: Iterable[Stratum]) -> float:
    """P value of "within each cluster A and B may be swapped", two-sided and exact; McNemar's for clusters of a pair.

    Every cluster's difference is as likely with the other sign. Adds up all 2^clusters signs.
    Source: R. A. Fisher, The Design of Experiments (1935), section 21.
    """
    swapped = []
    for only_a, only_b, pairs in clusters:
        check_counts(only_a, only_b, pairs)
        swapped.append((only_a - only_b, [only_a - only_b, only_b - only_a]))
    return _permuted(swapped)


def exchange_exact(clusters: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """P value of "within each cluster all layouts may be swapped", for a group A of layouts against a group B; exact.

    clusters: for each layout of A, and each of B, how often it had the outcome within the cluster. The statistic is
    the difference of the groups' means, two-sided, over all ways to call as many of the layouts A. With one layout
    in each it is sign_flip_exact. It also rejects where layouts of one group differ among themselves by enough.
    Raises UsageError for an empty group.
    """
    swapped = []
    for group_a, group_b in clusters:
        if not group_a or not group_b:
            raise UsageError("groups: one is empty; both need a layout to compare")
        everyone, total = [*group_a, *group_b], sum(group_a) + sum(group_b)
        size = len(everyone)
        # len(B) times the sum over A less len(A) times the sum over B: a whole number, equal to this.
        sums = [size * sum(chosen) - len(group_a) * total for chosen in combinations(everyone, len(group_a))]
        swapped.append((sums[0], sums))
    return _permuted(swapped)


def _permuted(swapped: list[tuple[int, list[int]]]) -> float:
    """Of each cluster its difference as seen and all that it could have been: how often is the sum as far from 0?

    The distribution of the sum is built cluster by cluster, on the whole numbers.
    """
    import numpy as np

    seen, chances, lowest = 0, np.ones(1), 0
    for found, possible in swapped:
        seen += found
        least = min(possible)
        own = np.bincount(np.array(possible) - least) / len(possible)
        chances, lowest = np.convolve(chances, own), lowest + least
    sums = np.arange(len(chances)) + lowest
    return min(1.0, float(chances[np.abs(sums) >= abs(seen)].sum()))
