"""Known globals: names in a pickle stream that no user needs to be told of."""

from __future__ import annotations

from flipper.checkpoints.builders import BY_GLOBAL, STORAGES
from flipper.checkpoints.stubs import Global

_MARKERS = frozenset({
    *STORAGES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "per_tensor_affine", "per_channel_affine",
    "per_channel_affine_float_qparams",
})  # fmt: skip
"""Names in torch that only say which dtype or kind of quantisation is meant."""

_HARMLESS = frozenset({
    "argparse.Namespace", "types.SimpleNamespace", "numpy.dtype", "numpy.ndarray", "torch.device", "torch.Tensor",
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct", "collections.deque",
    "numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer", "torch._dynamo.decorators._DimRange",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch.serialization._get_layout",
    "builtins.dict", "builtins.list", "builtins.tuple", "builtins.int", "builtins.float", "builtins.str",
    "builtins.bool", "builtins.object", "builtins.slice", "builtins.range", "__builtin__.object", "__builtin__.list",
    "__builtin__.dict", "__builtin__.int", "__builtin__.float", "__builtin__.str", "__builtin__.slice",
    "__builtin__.xrange", "__builtin__.tuple", "__builtin__.bool",
})  # fmt: skip
"""Names that stay Objects, but that no user needs to be told of."""

_HARMLESS_MODULES = (
    "torch.nn.", "torch.ao.", "torch.optim.", "numpy.random.", "torch.distributed.tensor",
    "torch.distributed.device_mesh", "torch.distributed._mesh_layout", "__torch__", "datetime", "pathlib",
)  # fmt: skip


def known(name: Global) -> bool:
    """Whether the global is one that checkpoints have as a matter of course."""
    module = name.module
    if module in ("torch", "torch.storage", "torch.cuda") and (name.name.endswith("Storage") or name.name in _MARKERS):
        return True
    return name in BY_GLOBAL or name.qualified in _HARMLESS or module.startswith(_HARMLESS_MODULES)
