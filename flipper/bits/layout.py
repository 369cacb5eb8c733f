"""BitLayout: sign, exponent and mantissa of every dtype, and the numbers that its bits stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flipper.errors import UsageError

Bits = np.ndarray[Any, np.dtype[np.uint64]]
"""Elements as numbers: one uint64 an element, bit 0 the least significant of the value."""


@dataclass(frozen=True)
class BitLayout:
    """How one element (one real number) of a dtype is made of bits; position 0 is the least significant.

    width: bits of one element as stored; less than 8 only in packed dtypes.
    kind: "float", "int" (two's complement), "uint" or "bool".
    exponent, mantissa: how many bits they have; the mantissa lies lowest, the exponent above it.
    signed: whether the top bit is a sign.
    specials: which patterns are no finite number: "ieee" (exponent all ones), "fn" (exponent and mantissa
        all ones are NaN), "fnuz" (minus zero is NaN), "scale" (all ones are NaN), "none".
    components: real numbers in one element of the container: 2 for complex dtypes, else 1.
    """

    name: str
    width: int
    kind: str
    exponent: int = 0
    mantissa: int = 0
    signed: bool = True
    bias: int = 0
    specials: str = "none"
    components: int = 1

    @property
    def packed(self) -> bool:
        """Whether several elements share a byte."""
        return self.width < 8

    @property
    def itemsize(self) -> int:
        """Bytes of one real number; 0 for packed dtypes."""
        return self.width // 8

    @property
    def word(self) -> str:
        """The unsigned numpy type that holds one element, such as "u4"."""
        return f"u{self.itemsize or 1}"

    @property
    def real(self) -> bool:
        """Whether it is a floating-point or complex dtype, which is struck by default."""
        return self.kind == "float"

    def positions(self, field: str) -> tuple[int, ...]:
        """Bit positions of "sign", "exponent", "mantissa" or "any", ascending; empty where there is no such field."""
        if field == "any":
            return (0,) if self.kind == "bool" else tuple(range(self.width))
        if field == "sign":
            return (self.width - 1,) if self.signed else ()
        if field == "exponent":
            return tuple(range(self.mantissa, self.mantissa + self.exponent))
        return tuple(range(self.mantissa))

    def field_of(self, position: int) -> str:
        """The field that a position belongs to: sign, exponent, mantissa, or value (of an integer or bool)."""
        if self.signed and position == self.width - 1:
            return "sign"
        if self.kind != "float":
            return "value"
        return "exponent" if position >= self.mantissa else "mantissa"

    def is_finite(self, bits: Bits) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which elements are finite numbers; integers always are."""
        body = bits & _ones(self.width - self.signed)
        if self.specials == "ieee":
            top = _ones(self.exponent) << np.uint64(self.mantissa)
            return np.asarray((bits & top) != top)
        if self.specials in ("fn", "scale"):
            return np.asarray(body != _ones(self.width - self.signed))
        if self.specials == "fnuz":
            return np.asarray(bits != np.uint64(1 << (self.width - 1)))
        return np.ones(bits.shape, np.bool_)

    def decode(self, bits: Bits) -> np.ndarray[Any, Any]:
        """The numbers that the bits stand for: float64, int64, uint64 or bool, exact for every dtype."""
        if self.kind == "bool":
            return np.asarray(bits != 0)
        if self.kind == "uint":
            return bits
        if self.kind == "int":
            shift = np.uint64(64 - self.width)
            signed: np.ndarray[Any, np.dtype[np.int64]] = (bits << shift).view(np.int64) >> np.int64(shift)
            return signed
        native = _NATIVE.get(self.width) if self.specials == "ieee" and self.exponent in (5, 8, 11) else None
        if native is not None and native[1:] == (self.exponent, self.mantissa):
            with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one, which is what is meant
                return np.asarray(bits.astype(f"u{self.width // 8}").view(native[0]).astype(np.float64))
        return self._decode_float(bits)

    def _decode_float(self, bits: Bits) -> np.ndarray[Any, np.dtype[np.float64]]:
        mantissa = (bits & _ones(self.mantissa)).astype(np.float64)
        exponent = ((bits >> np.uint64(self.mantissa)) & _ones(self.exponent)).astype(np.int64)
        if self.specials == "scale":
            values = np.ldexp(1.0, exponent - self.bias)
        else:
            normal = exponent > 0
            significand = np.where(normal, mantissa + 2.0**self.mantissa, mantissa)
            values = np.ldexp(significand, np.where(normal, exponent, 1) - self.bias - self.mantissa)
        if self.signed:
            negative = ((bits >> np.uint64(self.width - 1)) & np.uint64(1)).astype(bool)
            values = np.where(negative, -values, values)
        finite = self.is_finite(bits)
        infinite = ~finite & (mantissa == 0) & (self.specials == "ieee")
        values = np.where(infinite, np.copysign(np.inf, values), values)
        return np.asarray(np.where(finite | infinite, values, np.nan))

    def encode(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> Bits:
        """The bits of float64 values rounded to this floating-point dtype, to nearest, ties to even.

        Too large: infinity, else NaN, else the largest number, as the dtype has them. NaN: the dtype's positive quiet
        one, whatever the sign; minus zero where there is none. float8_e8m0fnu has powers of two alone: ties go up,
        and what is not positive is NaN.
        """
        if self.specials == "scale":
            return self._encode_scale(values)
        _, exponents = np.frexp(values)
        # Subnormal numbers have the lowest exponent too, and so has zero, for which frexp says 0.
        lowest = np.where(values == 0, 1 - self.bias, np.maximum(exponents - 1, 1 - self.bias))
        with np.errstate(invalid="ignore"):
            steps = np.rint(np.ldexp(np.abs(values), self.mantissa - lowest))
            steps = np.where(np.isfinite(values), steps, 0).astype(np.uint64)
        # The leading 1 of a normal number, and a carry out of the mantissa, count the exponent up by themselves.
        bits = ((lowest + self.bias - 1).astype(np.uint64) << np.uint64(self.mantissa)) + steps
        largest, overflow = self._limits()
        bits = np.where((bits > largest) | np.isinf(values), overflow, bits)
        signed = np.signbit(values)
        if self.specials == "fnuz":
            signed &= (bits != 0) & (bits != overflow)
        bits = bits | (signed.astype(np.uint64) << np.uint64(self.width - 1))
        return np.where(np.isnan(values), self._nan(), bits)

    def _encode_scale(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> Bits:
        fractions, exponents = np.frexp(values)
        codes = np.maximum(exponents - 1 + self.bias + (fractions >= 0.75), 0)
        positive = np.isfinite(values) & (values > 0)
        return np.where(positive, np.minimum(codes, 255), 255).astype(np.uint64)

    def _limits(self) -> tuple[np.uint64, np.uint64]:
        """The bits of the largest number, and what stands for larger ones."""
        body = _ones(self.width - 1)
        if self.specials == "ieee":
            infinity = _ones(self.exponent) << np.uint64(self.mantissa)
            return infinity - np.uint64(1), infinity
        if self.specials == "fn":
            return body - np.uint64(1), body
        return body, body + np.uint64(1) if self.specials == "fnuz" else body

    def _nan(self) -> np.uint64:
        """The bits of a NaN; minus zero in a dtype that has none."""
        if self.specials == "ieee":
            return _ones(self.exponent + 1) << np.uint64(self.mantissa - 1)
        return _ones(self.width - 1) if self.specials == "fn" else np.uint64(1 << (self.width - 1))

    def value(self, bits: int) -> float | int | bool:
        """The one number that `bits` stand for, as a Python object."""
        value: float | int | bool = self.decode(np.array([bits], np.uint64))[0].item()
        return value


_NATIVE = {64: ("<f8", 11, 52), 32: ("<f4", 8, 23), 16: ("<f2", 5, 10)}


def _ones(count: int) -> np.uint64:
    return np.uint64((1 << count) - 1)


def _floats() -> list[BitLayout]:
    rows = [
        ("float64", 64, 11, 52, 1023, "ieee"),
        ("float32", 32, 8, 23, 127, "ieee"),
        ("float16", 16, 5, 10, 15, "ieee"),
        ("bfloat16", 16, 8, 7, 127, "ieee"),
        ("float8_e3m4", 8, 3, 4, 3, "ieee"),
        ("float8_e4m3", 8, 4, 3, 7, "ieee"),
        ("float8_e4m3fn", 8, 4, 3, 7, "fn"),
        ("float8_e4m3fnuz", 8, 4, 3, 8, "fnuz"),
        ("float8_e4m3b11fnuz", 8, 4, 3, 11, "fnuz"),
        ("float8_e5m2", 8, 5, 2, 15, "ieee"),
        ("float8_e5m2fnuz", 8, 5, 2, 16, "fnuz"),
        ("float6_e2m3fn", 6, 2, 3, 1, "none"),
        ("float6_e3m2fn", 6, 3, 2, 3, "none"),
        ("float4_e2m1fn", 4, 2, 1, 1, "none"),
    ]
    floats = [BitLayout(n, w, "float", e, m, True, b, s) for n, w, e, m, b, s in rows]
    floats.append(BitLayout("float8_e8m0fnu", 8, "float", 8, 0, False, 127, "scale"))
    for _name, width, exponent, mantissa, bias, specials in rows[:3]:
        complex_name = f"complex{2 * width}"
        floats.append(BitLayout(complex_name, width, "float", exponent, mantissa, True, bias, specials, 2))
    return floats


def _integers() -> list[BitLayout]:
    integers = [BitLayout("bool", 8, "bool", signed=False)]
    for width in (8, 16, 32, 64):
        integers.append(BitLayout(f"int{width}", width, "int"))
        integers.append(BitLayout(f"uint{width}", width, "uint", signed=False))
    integers += [BitLayout("qint8", 8, "int"), BitLayout("qint32", 32, "int")]
    for name, width in (("quint8", 8), ("quint4x2", 4), ("quint2x4", 2)):
        integers.append(BitLayout(name, width, "uint", signed=False))
    return integers


_LAYOUTS = {layout.name: layout for layout in _floats() + _integers()}


def dtype_names() -> tuple[str, ...]:
    """The names of all dtypes that flipper knows."""
    return tuple(_LAYOUTS)


def layout(name: str) -> BitLayout:
    """The layout of the dtype called `name`; raises UsageError for a name that flipper doesn't know."""
    try:
        return _LAYOUTS[name]
    except KeyError:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join(_LAYOUTS)}") from None
