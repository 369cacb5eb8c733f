"""Builders: what a call in a pickle stream comes to: stubs of tensors for torch's rebuild functions, plain values for a
few harmless names, an inert Object for everything else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from flipper.checkpoints.stubs import Global, Object, Parts, Storage, StoredTensor, safe_key

DIMENSIONS = 64
"""The most axes of a tensor."""


class Budget:
    """Elements that calls may copy, in all: shared values must not grow the result beyond the stream."""

    def __init__(self, left: int) -> None:
        self.left = left + 4096

    def spend(self, count: int) -> None:
        """Take `count` off; raises ValueError when nothing is left."""
        self.left -= count
        if self.left < 0:
            raise ValueError("calls copy more than the stream holds")


def build(function: Any, args: Any, budget: Budget) -> Any:
    """The value that a call in the stream stands for; nothing is called but the builders of this module."""
    if type(args) is not tuple:
        raise TypeError("a call needs a tuple of arguments")
    if type(function) is not Global:
        return Object(function.name if type(function) is Object else type(function).__name__, args)
    builder = BY_GLOBAL.get(function)
    if builder is None:
        return Object(function.qualified, args)
    budget.spend(len(args))
    return builder(args, budget)


def persistent(identity: Any) -> Any:
    """What a persistent id stands for: a storage, or the class of a module whose source was saved with it."""
    if type(identity) is not tuple or len(identity) < 2:
        raise TypeError("unknown kind of persistent id")
    if identity[0] == "module":
        return identity[1]
    kind, storage_type, key, _location, count, *rest = identity
    if kind != "storage" or type(storage_type) is not Global or type(key) not in (str, int) or not _natural(count):
        raise TypeError("unknown kind of persistent id")
    view = rest[0] if rest else None
    first = 0
    if view is not None:
        _view_key, first, count = view
        if not _natural(first) or not _natural(count):
            raise TypeError("a view of a storage needs natural numbers")
    return Storage(str(key), _storage_dtype(storage_type.name), count, first)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _storage_dtype(name: str) -> str | None:
    if name == "UntypedStorage":
        return None
    try:
        return STORAGES[name]
    except KeyError:
        raise ValueError(f"unknown storage {name[:40]}") from None


def _naturals(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or len(value) > DIMENSIONS:
        raise TypeError("a shape or stride is no list")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:
            raise TypeError("a shape or stride is no list of natural numbers")
    return tuple(value)


def _dtype(value: Any) -> str:
    if type(value) is not Global:
        raise TypeError("a dtype is expected")
    return value.name


def _tensor(args: tuple[Any, ...], budget: Budget) -> StoredTensor:
    storage, offset, shape, strides, *rest = args
    if type(storage) is not Storage or not _natural(offset):
        raise TypeError("a tensor needs a storage and an offset")
    shape, strides = _naturals(shape), _naturals(strides)
    if len(shape) != len(strides):
        raise TypeError("shape and strides differ in length")
    metadata = rest[2] if len(rest) > 2 and type(rest[2]) is dict else {}
    lazy = [name for name in ("conj", "neg") if metadata.get(name)]
    reason = f"stored with a pending {lazy[0]}: the bits on disk are not those of its values" if lazy else None
    return StoredTensor(storage, storage.dtype or "uint8", offset, shape, strides, reason=reason)


def _tensor_v3(args: tuple[Any, ...], budget: Budget) -> StoredTensor:
    storage, offset, shape, strides, grad, hooks, dtype, *metadata = args
    tensor = _tensor((storage, offset, shape, strides, grad, hooks, *metadata), budget)
    tensor.dtype = _dtype(dtype)
    return tensor


def _parameter(args: tuple[Any, ...], budget: Budget) -> Any:
    if type(args[0]) is not StoredTensor:
        return args[0]
    args[0].parameter = True
    args[0].frozen = len(args) > 1 and args[1] is False
    return _with_attributes(args[0], args[3] if len(args) > 3 else None, budget)


def _with_attributes(tensor: StoredTensor, state: Any, budget: Budget) -> Any:
    """The tensor, and those among its attributes."""
    found = _tensors_in(state, budget)
    return Parts("torch.Tensor", {"": tensor, **found}) if found else tensor


def _tensors_in(state: Any, budget: Budget) -> dict[str, Any]:
    """The attributes in a state that are tensors."""
    attributes = Object("", state=state).attributes()
    budget.spend(len(attributes))
    tensors = (StoredTensor, Parts)
    return {key: part for key, part in attributes.items() if type(key) is str and key and type(part) in tensors}


def _quantized(args: tuple[Any, ...], budget: Budget) -> Any:
    tensor = _tensor(args[:4], budget)
    parts = {"": tensor}
    quantizer = args[4]
    if type(quantizer) is tuple and len(quantizer) >= 3:
        for name, part in zip(("scales", "zero_points"), quantizer[1:3], strict=True):
            if type(part) is StoredTensor:
                parts[name] = part
    return Parts("torch.Tensor", parts) if len(parts) > 1 else tensor


def _sparse(args: tuple[Any, ...], budget: Budget) -> Parts:
    layout, data = args
    kind = layout.args[0] if type(layout) is Object and layout.args else layout
    names = _SPARSE.get(kind if type(kind) is str else "", ("indices", "values"))
    if type(data) is not tuple or not all(type(part) is StoredTensor for part in data[: len(names)]):
        raise TypeError("a sparse tensor needs tensors")
    return Parts("torch.sparse", dict(zip(names, data, strict=False)))


def _nested(args: tuple[Any, ...], budget: Budget) -> Parts:
    return Parts("torch.nested", dict(zip(("values", "sizes", "strides", "offsets"), args, strict=False)))


def _jagged(args: tuple[Any, ...], budget: Budget) -> Parts:
    (keywords,) = args
    return Parts("torch.nested", _tensors_in(keywords, budget))


def _meta(args: tuple[Any, ...], budget: Budget) -> StoredTensor:
    dtype, shape, strides, *_grad = args
    reason = "a meta tensor has no bytes"
    return StoredTensor(None, _dtype(dtype), 0, _naturals(shape), _naturals(strides), reason=reason)


def _wrapper(args: tuple[Any, ...], budget: Budget) -> StoredTensor:
    kind, dtype, shape, strides, *_rest = args
    reason = f"a {kind.name if type(kind) is Global else 'wrapper'} without a storage of its own"
    return StoredTensor(None, _dtype(dtype), 0, _naturals(shape), _naturals(strides), reason=reason)


def _subclass(args: tuple[Any, ...], budget: Budget) -> Any:
    function, kind, inner_args, state = args
    if type(function) is Global and BY_GLOBAL.get(function) is _subclass:
        raise ValueError("a subclass rebuilt as a subclass")  # nested without end, it would exhaust our own stack
    inner = build(function, inner_args, budget)
    if type(inner) is not StoredTensor:
        return inner
    if inner.storage is not None:
        return _with_attributes(inner, state, budget)
    found = _tensors_in(state, budget)
    if list(found) == ["_local_tensor"]:
        return found["_local_tensor"]
    return Parts(kind.qualified if type(kind) is Global else "", found) if found else inner


def _first(args: tuple[Any, ...], budget: Budget) -> Any:
    return args[0]


def _size(args: tuple[Any, ...], budget: Budget) -> tuple[int, ...]:
    return _naturals(args[0]) if args else ()


def _dictionary(args: tuple[Any, ...], budget: Budget) -> Any:
    if not args:
        return {}
    if type(args[0]) is dict:
        return args[0]
    made: dict[Any, Any] = {}
    budget.spend(len(args[0]))
    for key, value in args[0]:
        made[safe_key(key, len(made))] = value
    return made


def _defaults(args: tuple[Any, ...], budget: Budget) -> Any:
    return _dictionary(args[1:], budget)


def _encode(args: tuple[Any, ...], budget: Budget) -> bytes:
    text, encoding = args
    if encoding not in ("latin1", "latin-1") or type(text) is not str:
        raise ValueError("only latin1 text can be encoded")
    budget.spend(len(text))
    return text.encode("latin-1")


def _bytes(args: tuple[Any, ...], budget: Budget) -> bytes:
    if not args:
        return b""
    if type(args[0]) is bytes:
        return args[0]
    if type(args[0]) is str and args[1:] and args[1] in ("latin-1", "latin1"):
        return _encode(args[:2], budget)
    raise TypeError("bytes are expected")


def _complex(args: tuple[Any, ...], budget: Budget) -> complex:
    real, imaginary = args
    return complex(float(real), float(imaginary))


def _collection(name: str) -> Callable[[tuple[Any, ...], Budget], Object]:
    def builder(args: tuple[Any, ...], budget: Budget) -> Object:
        return Object(name, items=args[0] if args and type(args[0]) is list else None)

    return builder


def _new_object(args: tuple[Any, ...], budget: Budget) -> Object:
    return Object(args[0].qualified if type(args[0]) is Global else "", args[1:])


def _scalar(args: tuple[Any, ...], budget: Budget) -> Any:
    """A numpy scalar as a Python one where there is one of that kind."""
    dtype, *raw = args
    code = dtype.args[0] if type(dtype) is Object and dtype.args else ""
    big = type(dtype) is Object and type(dtype.state) is tuple and len(dtype.state) > 1 and dtype.state[1] == ">"
    form = _SCALARS.get(code if type(code) is str else "")
    data = raw[0] if raw else b""
    data = data.encode("latin-1") if type(data) is str else data
    if form is None or type(data) is not bytes or len(data) != struct.calcsize(form):
        return Object("numpy.scalar", (dtype,))
    values = struct.unpack((">" if big else "<") + form, data)
    return values[0] if len(values) == 1 else complex(*values)


_SPARSE = {
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""The tensors that a compressed layout is made of; any other has indices and values."""

_SCALARS = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "ComplexHalfStorage": "complex32", "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8", "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}  # fmt: skip

_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy.core.multiarray": "numpy._core.multiarray"}
"""Older spellings of modules."""

_BUILDERS: dict[str, Callable[[tuple[Any, ...], Budget], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_numpy": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._utils._rebuild_xla_tensor": _first,
    "torch._tensor._rebuild_from_type": _subclass,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.jit._pickle.build_intlist": _first,
    "torch.jit._pickle.build_tensorlist": _first,
    "torch.jit._pickle.build_doublelist": _first,
    "torch.jit._pickle.build_boollist": _first,
    "torch.jit._pickle.restore_type_tag": _first,
    "torch.Size": _size,
    "torch.torch_version.TorchVersion": _first,
    "collections.OrderedDict": _dictionary,
    "collections.Counter": _dictionary,
    "collections.defaultdict": _defaults,
    "builtins.set": _collection("builtins.set"),
    "builtins.frozenset": _collection("builtins.frozenset"),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _new_object,
    "copyreg.__newobj__": _new_object,
    "numpy._core.multiarray.scalar": _scalar,
}

BY_GLOBAL = {
    (module, name.rpartition(".")[2]): builder
    for name, builder in _BUILDERS.items()
    for module in (name.rpartition(".")[0], *(old for old, new in _MODULES.items() if new == name.rpartition(".")[0]))
}
"""_BUILDERS by module, each of its spellings, and name."""
