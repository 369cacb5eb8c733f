"""Many comparisons at once."""

from __future__ import annotations

from collections.abc import Sequence

from flipper.statistics.ranges import check_share


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P values adjusted so that the chance of any false alarm among all comparisons stays at the level.

    Reject where the adjusted value is at most the level. In the order given; None (not tested) stays None and does
    not count. Raises UsageError for a value outside [0, 1].
    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    tested = [(value, place) for place, value in enumerate(p_values) if value is not None]
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (value, place) in enumerate(sorted(tested)):
        check_share("p value", value, "certainty", 1)
        highest = max(highest, min(1.0, value * (len(tested) - rank)))
        adjusted[place] = highest
    return adjusted
