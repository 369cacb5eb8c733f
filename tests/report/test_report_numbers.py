"""Numbers as the page shows them, against what a reader would write."""

import math
import random

import pytest

from flipper.report.numbers import given, number_, p_, percent, points, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0, "0"), (7, "7"), (2573696, "2,573,696"), (-3, "−3"), (0.15132, "0.151"), (12.345, "12.3"),
        (123.456, "123"), (1234.56, "1,235"), (0.99999, "1.00"), (9.996, "10.0"), (0.00012345, "0.000123"),
        (0.000012345, "1.23 × 10⁻⁵"), (6.359e-10, "6.36 × 10⁻¹⁰"), (-2.5e12, "−2.50 × 10¹²"), (None, "–"),
        (math.inf, "∞"), (-math.inf, "−∞"), (math.nan, "NaN"),
    ],
)  # fmt: skip
def test_three_digits_that_count(value: float | None, text: str) -> None:
    assert significant(value) == text


def test_shares_and_differences() -> None:
    assert [percent(share) for share in (0, 1, 0.125, 1 / 3, 0.00033, None)] == [
        "0%", "100%", "12.5%", "33.3%", "0.0330%", "–",
    ]  # fmt: skip
    assert [points(gap) for gap in (0.0, 0.0125, -0.5, None)] == ["0", "+1.25", "−50.0", "–"]
    assert [given(value) for value in (95.0, 100 * 0.999, 10, 0.05)] == ["95", "99.9", "10", "0.05"]


def test_the_exact_value_stands_beside() -> None:
    assert number_(1 / 3) == f"<data value='{1 / 3!r}'>0.333</data>"
    assert p_(0.0) == "<data value='0.0'>&lt; 10⁻³⁰⁰</data>"
    assert number_(None) == "<data value=''>–</data>"


def test_no_shown_number_is_off_by_more_than_half_a_digit() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        value = chance.choice((-1, 1)) * 10 ** chance.uniform(-4, 5)
        shown = float(significant(value).replace("−", "-").replace(",", ""))
        digit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
        assert abs(shown - value) <= 0.5 * min(digit, 1.0) * (1 + 1e-9)
