"""The canonical state: full, unsharded tensors by name, the same for every layout, so that all share checkpoints.

model.<parameter or buffer>         optimizer.<parameter>.<exp_avg, momentum_buffer, step ...>
progress.<step, epoch, batch, seed> rng.rank<N>.<cpu, cuda>
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from flipper.errors import MismatchError

State = dict[str, Tensor]


def collect(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies, on the CPU, of a module's parameters and buffers and of their optimizer's state."""
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is not None:
                state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


def restore(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Copy into a module and its optimizer what a canonical state says of them; `check` it first.

    The module's own tensors are kept and written to, so a wrapper that holds them stays valid.
    """
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(state[f"model.{name}"])
    optimizer.state.clear()
    for name, parameter in module.named_parameters():
        prefix = f"optimizer.{name}."
        for key, value in state.items():
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                # A scalar (Adam's step) stays on the CPU, where optimizers keep it.
                device = parameter.device if value.dim() else "cpu"
                optimizer.state[parameter][key[len(prefix) :]] = value.detach().to(device, copy=True)


def check(state: Mapping[str, Tensor], module: nn.Module, recipe: str) -> None:
    """Raise MismatchError when a state is not of this module: names, dtypes and shapes, not values."""
    expected = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for name, tensor in expected.items():
        if name not in state:
            raise MismatchError(f"not a checkpoint of {recipe}: {name} is missing")
        if (state[name].dtype, state[name].shape) != (tensor.dtype, tensor.shape):
            raise MismatchError(
                f"not a checkpoint of {recipe}: {name} is {_describe(state[name])}, not {_describe(tensor)}"
            )
    parameters = dict(module.named_parameters())
    for name, tensor in state.items():
        if name.startswith("model.") and name not in expected:
            raise MismatchError(f"not a checkpoint of {recipe}: it has {name}, which the recipe lacks")
        if name.startswith("optimizer."):
            owner = parameters.get(name.removeprefix("optimizer.").rpartition(".")[0])
            if owner is None or (tensor.dim() and tensor.shape != owner.shape):
                raise MismatchError(f"not a checkpoint of {recipe}: {name} ({_describe(tensor)}) fits no parameter")


def _describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor)}{list(tensor.shape)}"


def dtype_name(tensor: Tensor) -> str:
    """As flipper and numpy call it: float32, bfloat16, int64 ..."""
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order, little-endian as torch's machines are; of any dtype."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


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
