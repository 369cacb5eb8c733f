"""The language of --bits: fields, their most significant bits, positions and ranges, by each dtype's own layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flipper.bits import BitSpec, dtype_names, layout
from flipper.errors import UsageError

RANGES = st.tuples(st.integers(0, 70), st.integers(0, 70)).map(sorted)
TERMS = st.one_of(st.integers(0, 70).map(lambda n: [n, n]), RANGES)


@pytest.mark.parametrize(
    ("text", "dtype", "positions"),
    [
        ("any", "float32", range(32)),
        ("sign", "float32", [31]),
        ("exponent", "float32", range(23, 31)),
        ("mantissa", "float32", range(23)),
        ("exponent-msb", "float32", [30]),
        ("mantissa-msb", "float32", [22]),
        ("exponent-msb", "bfloat16", [14]),
        ("mantissa-msb", "bfloat16", [6]),
        ("exponent", "float16", range(10, 15)),
        ("exponent", "float64", range(52, 63)),
        ("sign,exponent-msb", "float8_e4m3fn", [6, 7]),
        ("exponent", "complex64", range(23, 31)),
        ("any", "float4_e2m1fn", range(4)),
        ("mantissa", "float8_e8m0fnu", []),
        ("sign", "float8_e8m0fnu", []),
        ("mantissa-msb", "float8_e8m0fnu", []),
        ("exponent", "float8_e8m0fnu", range(8)),
        ("30", "float32", [30]),
        ("23-30", "float32", range(23, 31)),
        ("0,31,5-7,6", "float32", [0, 5, 6, 7, 31]),
        (" sign , 0 ", "float32", [0, 31]),
        ("mantissa,mantissa-msb", "float16", range(10)),
        ("any", "int8", range(8)),
        ("sign", "int8", [7]),
        ("sign", "uint8", []),
        ("exponent,mantissa,exponent-msb,mantissa-msb", "int32", []),
        ("any", "bool", [0]),
        ("sign,exponent,mantissa", "bool", []),
        ("3", "bool", [3]),
        ("any,7", "bool", [0, 7]),
        ("any", "quint4x2", range(4)),
    ],
)
def test_a_spec_names_these_positions(text, dtype, positions):
    assert BitSpec(text).positions(layout(dtype)) == tuple(positions)


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "any,", "exp", "Sign", "-1", "1.5", "30-", "-", "0x1f", "1-2-3", "sign exponent", "1000", "٣"],
)
def test_anything_else_is_refused_with_what_is_allowed(text):
    with pytest.raises(UsageError, match="none of any, sign, exponent, mantissa, exponent-msb, mantissa-msb, a pos"):
        BitSpec(text)


def test_a_number_is_refused_with_how_to_write_it():
    with pytest.raises(UsageError, match="write '30'"):
        BitSpec(30)


def test_a_range_that_runs_backwards_is_refused():
    with pytest.raises(UsageError, match="30-23 is empty; write the lower position first"):
        BitSpec("30-23")


@given(terms=st.lists(TERMS, min_size=1, max_size=5), dtype=st.sampled_from(dtype_names()))
def test_positions_that_a_dtype_has_are_taken_and_the_others_reported(terms, dtype):
    spec = BitSpec(",".join(str(low) if low == high else f"{low}-{high}" for low, high in terms))
    named = {position for low, high in terms for position in range(low, high + 1)}
    width = layout(dtype).width
    assert spec.positions(layout(dtype)) == tuple(sorted(p for p in named if p < width))
    assert spec.missing(layout(dtype)) == tuple(sorted(p for p in named if p >= width))


def test_a_field_that_a_dtype_lacks_is_not_missing():
    assert BitSpec("sign,mantissa").missing(layout("float8_e8m0fnu")) == ()
