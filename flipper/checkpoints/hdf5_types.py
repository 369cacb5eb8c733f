"""HDF5 datatypes: which dtype of flipper's a dataset's elements are, and in which byte order they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flipper import bits
from flipper.errors import UsageError

_FLOATS = {
    (8, 11, 52, 1023): "float64",
    (4, 8, 23, 127): "float32",
    (2, 5, 10, 15): "float16",
    (2, 8, 7, 127): "bfloat16",
    (1, 3, 4, 3): "float8_e3m4",
    (1, 4, 3, 7): "float8_e4m3fn",
    (1, 4, 3, 8): "float8_e4m3fnuz",
    (1, 4, 3, 11): "float8_e4m3b11fnuz",
    (1, 5, 2, 15): "float8_e5m2",
    (1, 5, 2, 16): "float8_e5m2fnuz",
}
"""(bytes, exponent bits, mantissa bits, bias); an 8-bit 4-3 float of bias 7 is taken for the OCP's E4M3."""


@dataclass(frozen=True)
class ElementType:
    """What the elements of a dataset are.

    dtype: a name of flipper.bits, or any text when `reason` says why flipper can't strike such elements.
    order: "little" or "big".
    """

    dtype: str
    order: str = "little"
    reason: str | None = None


def element_type(datatype: Any, stated: Callable[[], str | None] = lambda: None) -> ElementType:
    """The elements of an h5py TypeID.

    stated: gives the dtype that the dataset's attribute `dtype` names (Keras writes one); asked for opaque bytes.
    """
    from h5py import h5t

    kind = datatype.get_class()
    readers = {
        h5t.FLOAT: _float,
        h5t.INTEGER: _integer,
        h5t.ENUM: _enum,
        h5t.COMPOUND: _compound,
        getattr(h5t, "COMPLEX", None): _complex,
        h5t.ARRAY: _array,
    }
    if kind == h5t.OPAQUE:
        return _opaque(datatype, stated())
    if kind in readers:
        return readers[kind](datatype)
    names = {h5t.STRING: "string", h5t.VLEN: "vlen", h5t.REFERENCE: "reference", h5t.BITFIELD: "bitfield"}
    name = names.get(kind, f"class-{kind}")
    if kind == h5t.STRING and datatype.is_variable_str():
        name = "vlen string"
    return _refused(name, f"{name} elements are no numbers")


def _refused(dtype: str, reason: str) -> ElementType:
    return ElementType(dtype, reason=reason)


def _array(datatype: Any) -> ElementType:
    return _refused("array", f"elements are arrays of shape {datatype.get_array_dims()}")


def _order(datatype: Any) -> str | None:
    from h5py import h5t

    orders = {h5t.ORDER_LE: "little", h5t.ORDER_BE: "big", h5t.ORDER_NONE: "little"}
    return orders.get(datatype.get_order())


def _float(datatype: Any) -> ElementType:
    from h5py import h5t

    size, bias = datatype.get_size(), datatype.get_ebias()
    sign_at, exponent_at, exponent, mantissa_at, mantissa = datatype.get_fields()
    seen = f"float{8 * size} of {exponent} exponent and {mantissa} mantissa bits, bias {bias}"
    dtype = _FLOATS.get((size, exponent, mantissa, bias))
    order = _order(datatype)
    tidy = (mantissa_at, exponent_at, sign_at) == (0, mantissa, 8 * size - 1) and datatype.get_offset() == 0
    if dtype is None or not tidy or order is None or datatype.get_norm() != h5t.NORM_IMPLIED:
        return _refused("float", f"a custom float that flipper doesn't know: {seen}")
    return ElementType(dtype, order)


def _integer(datatype: Any) -> ElementType:
    from h5py import h5t

    size, order = datatype.get_size(), _order(datatype)
    if size not in (1, 2, 4, 8) or datatype.get_precision() != 8 * size or datatype.get_offset() or order is None:
        return _refused("integer", f"an integer of {datatype.get_precision()} bits in {size} bytes")
    sign = "int" if datatype.get_sign() == h5t.SGN_2 else "uint"
    return ElementType(f"{sign}{8 * size}", order)


def _enum(datatype: Any) -> ElementType:
    members = {datatype.get_member_name(index): datatype.get_member_value(index) for index in _members(datatype)}
    if members == {b"FALSE": 0, b"TRUE": 1} and datatype.get_size() == 1:
        return ElementType("bool")
    return _refused("enum", "elements are an enumeration, not numbers")


def _compound(datatype: Any) -> ElementType:
    names = [datatype.get_member_name(index).decode("utf-8", "backslashreplace") for index in _members(datatype)]
    if [name.lower() for name in names] in (["r", "i"], ["real", "imag"], ["re", "im"]):
        first, second = datatype.get_member_type(0), datatype.get_member_type(1)
        offsets = (datatype.get_member_offset(0), datatype.get_member_offset(1))
        if first == second and offsets == (0, first.get_size()) and datatype.get_size() == 2 * first.get_size():
            return _pair(first)
    return _refused("compound", f"elements are records of {', '.join(names[:8])}")


def _members(datatype: Any) -> range:
    """Indexes of the members; a hostile file may claim very many, of which the first ones tell enough."""
    return range(min(datatype.get_nmembers(), 64))


def _complex(datatype: Any) -> ElementType:
    return _pair(datatype.get_super())


def _pair(part: Any) -> ElementType:
    """The complex dtype whose real and imaginary part are of the float type `part`."""
    from h5py import h5t

    real = _float(part) if part.get_class() == h5t.FLOAT else _refused("compound", "")
    widths = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}
    if real.dtype not in widths:
        return _refused("complex", f"complex numbers of {real.dtype} parts")
    return ElementType(widths[real.dtype], real.order)


def _opaque(datatype: Any, stated: str | None) -> ElementType:
    """Opaque bytes are what readers make of them: what the file states, else, two of them, bfloat16 as in Keras."""
    size = datatype.get_size()
    if stated is not None:
        try:
            layout = bits.layout(stated)
        except UsageError:
            layout = None
        if layout is not None and layout.itemsize == size and layout.components == 1:
            return ElementType(stated)
    tag = datatype.get_tag()
    if size == 2 and tag in (b"", b"bfloat16"):
        return ElementType("bfloat16")
    return _refused("opaque", f"opaque elements of {size} bytes (tag {tag[:40].decode('utf-8', 'backslashreplace')!r})")
