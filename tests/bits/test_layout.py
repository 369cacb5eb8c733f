"""Layouts of every dtype against numpy, ml_dtypes and struct: every pattern of up to 16 bits, samples of the wider."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from flipper.bits import dtype_names, layout
from flipper.errors import UsageError

REAL = [
    "float64", "float32", "float16", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn",
    "float4_e2m1fn",
]  # fmt: skip
COMPLEX = ["complex64", "complex128", "complex32"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
QUANTISED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
PACKED_QUANTISED = {"quint4x2": 4, "quint2x4": 2}
SMALL = [name for name in REAL if name not in ("float64", "float32")]


def their_dtype(name):
    native = name in ("float64", "float32", "float16", *INTEGERS)
    return np.dtype(name) if native else np.dtype(getattr(ml_dtypes, name))


def patterns(width):
    """Every pattern of up to 16 bits; of wider ones the edges of all fields and a random sample."""
    if width <= 16:
        return np.arange(1 << width, dtype=np.uint64)
    sample = np.random.default_rng(width).integers(0, 1 << width, 50_000, dtype=np.uint64, endpoint=False)
    edges = [((1 << high) - (1 << low)) ^ sign for high in range(width) for low in (0, high - 1) if low >= 0
             for sign in (0, 1 << (width - 1))]  # fmt: skip
    return np.concatenate([sample, np.array(edges, np.uint64)])


def their_values(bits, name):
    dtype = their_dtype(name)
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def test_all_names_are_those_of_the_formats():
    assert sorted(dtype_names()) == sorted([*REAL, *COMPLEX, *INTEGERS, "bool", *QUANTISED, *PACKED_QUANTISED])


@pytest.mark.parametrize("name", REAL)
def test_decoded_numbers_are_those_of_the_dtype_itself(name):
    bits = patterns(layout(name).width)
    with np.errstate(invalid="ignore"):
        theirs = their_values(bits, name).astype(np.float64)
    ours = layout(name).decode(bits)
    assert ours.dtype == np.float64
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


@pytest.mark.parametrize("name", REAL)
def test_finite_patterns_are_those_that_the_dtype_calls_finite(name):
    bits = patterns(layout(name).width)
    with np.errstate(invalid="ignore"):
        theirs = np.isfinite(their_values(bits, name))
    np.testing.assert_array_equal(layout(name).is_finite(bits), theirs)


@pytest.mark.parametrize("name", REAL)
def test_fields_are_as_wide_as_finfo_says(name):
    ours = layout(name)
    info = np.finfo(name) if name in ("float64", "float32", "float16") else ml_dtypes.finfo(their_dtype(name))
    signed = name != "float8_e8m0fnu"
    mantissa = info.nmant
    exponent = ours.width - mantissa - signed
    assert ours.width == info.bits
    if name != "float8_e8m0fnu":
        assert exponent == info.nexp
    assert ours.positions("mantissa") == tuple(range(mantissa))
    assert ours.positions("exponent") == tuple(range(mantissa, mantissa + exponent))
    assert ours.positions("sign") == ((ours.width - 1,) if signed else ())
    assert ours.positions("any") == tuple(range(ours.width))


@pytest.mark.parametrize("name", REAL)
def test_every_bit_does_to_a_number_what_its_field_says(name):
    """A sign bit negates; an exponent bit of a normal number multiplies by a power of two."""
    ours = layout(name)
    one = int(np.flatnonzero(ours.decode(patterns(16)[: 1 << min(ours.width, 16)]) == 1)[0]) if ours.width <= 16 else {
        "float32": 0x3F800000, "float64": 0x3FF0 << 48,
    }[name]  # fmt: skip
    for position in range(ours.width):
        struck = ours.value(one ^ 1 << position)
        field = ours.field_of(position)
        if field == "sign":
            assert struck == -1
        elif field == "mantissa":
            assert 1 < struck < 2
        elif np.isfinite(struck) and struck and (one ^ 1 << position) >> ours.mantissa & ((1 << ours.exponent) - 1):
            assert np.log2(struck) == int(np.log2(struck)) != 0


@pytest.mark.parametrize("name", [*INTEGERS, *QUANTISED])
def test_integers_decode_as_twos_complement(name):
    dtype = np.dtype(QUANTISED.get(name, name))
    ours = layout(name)
    bits = patterns(ours.width)
    assert ours.width == 8 * dtype.itemsize
    np.testing.assert_array_equal(ours.decode(bits), bits.astype(f"u{dtype.itemsize}").view(dtype))
    assert ours.is_finite(bits).all()


@pytest.mark.parametrize("name", PACKED_QUANTISED)
def test_packed_quantised_integers_are_unsigned(name):
    ours = layout(name)
    assert ours.width == PACKED_QUANTISED[name]
    assert ours.packed
    np.testing.assert_array_equal(ours.decode(patterns(ours.width)), np.arange(1 << ours.width))


@pytest.mark.parametrize("name", [*INTEGERS, *QUANTISED, *PACKED_QUANTISED])
def test_integers_have_a_sign_if_signed_and_no_other_field(name):
    ours = layout(name)
    signed = ours.kind == "int"
    assert signed == (name in ("int8", "int16", "int32", "int64", "qint8", "qint32"))
    assert ours.positions("sign") == ((ours.width - 1,) if signed else ())
    assert ours.positions("exponent") == ours.positions("mantissa") == ()
    assert ours.positions("any") == tuple(range(ours.width))
    assert {ours.field_of(position) for position in range(ours.width - signed)} == {"value"}
    assert ours.field_of(ours.width - 1) == ("sign" if signed else "value")


def test_bool_is_bit_0_of_a_byte():
    ours = layout("bool")
    assert ours.width == 8
    assert ours.positions("any") == (0,)
    assert ours.positions("sign") == ours.positions("exponent") == ours.positions("mantissa") == ()
    assert ours.decode(np.array([0, 1, 2], np.uint64)).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("name", "part"), [("complex64", "float32"), ("complex128", "float64"), ("complex32", "float16")]
)
def test_an_element_of_a_complex_dtype_is_one_real_number(name, part):
    ours, real = layout(name), layout(part)
    assert ours.components == 2
    for field in ("any", "sign", "exponent", "mantissa"):
        assert ours.positions(field) == real.positions(field)
    bits = patterns(real.width)
    np.testing.assert_array_equal(ours.decode(bits), real.decode(bits))


@pytest.mark.parametrize(
    ("name", "bits", "value"),
    [
        ("float32", 0x3F800000, 1.0),
        ("float64", 0xC000000000000000, -2.0),
        ("float16", 0x7BFF, 65504.0),
        ("bfloat16", 0x0001, 2.0**-133),
        ("float8_e4m3fn", 0x7E, 448.0),
        ("float4_e2m1fn", 0b1111, -6.0),
        ("int8", 0x80, -128),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("bool", 1, True),
    ],
)
def test_one_value_comes_as_a_python_number(name, bits, value):
    got = layout(name).value(bits)
    assert got == value
    assert type(got) is type(value)


def test_struct_agrees_on_floats_of_python():
    for code, name, width in (("<f", "float32", 4), ("<d", "float64", 8), ("<e", "float16", 2)):
        for number in (0.1, -3.5, 1e-5, 65504.0, 0.0):
            bits = int.from_bytes(struct.pack(code, number), "little")
            assert layout(name).value(bits) == struct.unpack(code, struct.pack(code, number))[0]
            assert layout(name).encode(np.array([number])).tolist() == [bits]
            assert len(struct.pack(code, number)) == width == layout(name).itemsize


@pytest.mark.parametrize("name", REAL)
def test_finite_numbers_come_back_as_the_same_bits(name):
    ours = layout(name)
    bits = patterns(ours.width)
    bits = bits[ours.is_finite(bits)]
    np.testing.assert_array_equal(ours.encode(ours.decode(bits)), bits)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "float8_e8m0fnu"])
def test_numbers_are_rounded_to_nearest_even_by_their_exact_value(name):
    """A hair beside the middle decides, also where float32 can't see it: no rounding twice."""
    ours = layout(name)
    bits = patterns(ours.width)
    bits = bits[ours.is_finite(bits)]
    numbers = ours.decode(bits)
    bits = bits[(numbers > 0) | (bits == 0)]  # without minus zero
    order = np.argsort(ours.decode(bits))
    bits, numbers = bits[order], ours.decode(bits)[order]
    middles = (numbers[1:] + numbers[:-1]) / 2
    even = np.where(bits[1:] % 2 == 0, bits[1:], bits[:-1])
    for sign, top in ((1, 0), (-1, 1 << (ours.width - 1))):
        for moved, expected in (
            (middles, even),
            (np.nextafter(middles, np.inf), bits[1:]),
            (np.nextafter(middles, -np.inf), bits[:-1]),
        ):
            zero = 0 if ours.specials == "fnuz" else top
            want = np.where(expected == 0, zero, expected | np.uint64(top)).astype(np.uint64)
            np.testing.assert_array_equal(ours.encode(sign * moved), want)


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_numpy_rounds_native_floats_the_same_way(name):
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal(50_000) * 10.0 ** rng.integers(-50, 50, 50_000)
    numbers = np.concatenate([numbers, [np.inf, -np.inf, 0.0, -0.0, 5e-324, -1e308]])
    with np.errstate(over="ignore"):
        theirs = numbers.astype(name).view(f"u{np.dtype(name).itemsize}")
    np.testing.assert_array_equal(layout(name).encode(numbers), theirs)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "float8_e8m0fnu"])
@pytest.mark.parametrize("number", [1e9, -1e9, 1e300, -1e300, np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-300, -1e-300])
def test_what_a_dtype_cannot_hold_becomes_what_ml_dtypes_makes_of_it(name, number):
    if name in ("bfloat16", "float8_e5m2") and abs(number) == 1e9:
        number *= 1e30
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = np.array([number]).astype(their_dtype(name)).view(f"u{max(layout(name).itemsize, 1)}")
    assert layout(name).encode(np.array([number])).tolist() == theirs.tolist()


@pytest.mark.parametrize("name", REAL)
def test_a_nan_is_encoded_alike_whatever_its_sign(name):
    assert len(set(layout(name).encode(np.array([np.nan, -np.nan])).tolist())) == 1


def test_powers_of_two_are_rounded_to_the_nearest_and_what_is_not_positive_is_nan():
    ours = layout("float8_e8m0fnu")
    numbers = [1.0, 1.49, 1.5, 3.0, 2.0**127, 2.0**-127, 1e-300, 1e300, 0.0, -1.0]
    assert ours.encode(np.array(numbers)).tolist() == [127, 127, 128, 129, 254, 0, 0, 255, 255, 255]


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="unknown dtype 'float7'; known: float64, float32"):
        layout("float7")
