"""Imported once by the fork server, so that each rank starts with torch and what it imports lazily at hand."""

import importlib

import torch

for module in (
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "sklearn.datasets",
    "h5py",
    "safetensors.torch",
):
    importlib.import_module(module)

# The first optimizer and this switch import torch._dynamo and torch._inductor: 3 s, once, here.
torch.use_deterministic_algorithms(True)
