"""The canonical state: full, unsharded tensors by name, the same for every layout, so that all share checkpoints.

model.<parameter or buffer>         optimizer.<parameter>.<exp_avg, momentum_buffer, step ...>
scheduler.<last_epoch ...>          progress.<step, epoch, batch, seed>
rng.rank<N>.<cpu, cuda>             rng.layout: the layout whose ranks these are, as ASCII
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from flipper.errors import MismatchError
from flipper.training.ties import parameters_of, ties_of

State = dict[str, Tensor]


def check(state: Mapping[str, Tensor], module: nn.Module, recipe: str) -> None:
    """Raise MismatchError when a state is not of this module: names, dtypes and shapes, not values."""
    expected = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    found = {name for name in state if name.startswith("model.")}
    wrong = [f"{label}: {_some(names)}" for label, names in
             (("missing", expected.keys() - found), ("unexpected", found - expected.keys())) if names]  # fmt: skip
    if wrong:
        raise MismatchError(f"not a checkpoint of {recipe}: {'; '.join(wrong)}")
    for name, tensor in expected.items():
        if (state[name].dtype, state[name].shape) != (tensor.dtype, tensor.shape):
            raise MismatchError(
                f"not a checkpoint of {recipe}: {name} is {_describe(state[name])}, not {_describe(tensor)}"
            )
    for alias, name in ties_of(module).items():
        if not same_bits(state[f"model.{alias}"], state[f"model.{name}"]):
            raise MismatchError(f"{recipe} ties model.{name} and model.{alias}, but they differ in the checkpoint")
    parameters = parameters_of(module)
    for name, tensor in state.items():
        if name.startswith("optimizer."):
            owner = parameters.get(name.removeprefix("optimizer.").rpartition(".")[0])
            if owner is None or not _fits(tensor, owner):
                raise MismatchError(f"not a checkpoint of {recipe}: {name} ({_describe(tensor)}) fits no parameter")


def _fits(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether this may be optimizer state: a number, a value an element, or one for each row, as Adafactor has."""
    if not tensor.dim():
        return True
    axes = zip(tensor.shape, parameter.shape, strict=False)
    return tensor.dim() == parameter.dim() and all(length in (1, whole) for length, whole in axes)


def _some(names: Iterable[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor)}{list(tensor.shape)}"


def dtype_name(tensor: Tensor) -> str:
    """As flipper and numpy call it: float32, bfloat16, int64 ..."""
    return str(tensor.dtype).removeprefix("torch.")


def octets(tensor: Tensor) -> Tensor:
    """A tensor's bytes in row-major order, on the CPU, little-endian as torch's machines are; of any dtype."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The same as bytes."""
    return octets(tensor).numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (a NaN equals itself, -0 differs from 0)."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and tensor_bytes(a) == tensor_bytes(b)


def digest(state: Mapping[str, Tensor], prefixes: Iterable[str] = ("model.", "optimizer.")) -> str:
    """sha256 over name, dtype, shape and bytes of the tensors with these prefixes, in name order, as hex."""
    total = hashlib.sha256()
    wanted = tuple(prefixes)
    for name in sorted(name for name in state if name.startswith(wanted)):
        tensor = state[name]
        total.update(f"{name}\0{_describe(tensor)}\0".encode())
        total.update(tensor_bytes(tensor))
    return total.hexdigest()
