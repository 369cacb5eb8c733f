"""Imported once by the fork server, so that each rank starts with torch and what it imports lazily at hand."""

import importlib
import os
import sys

# Before the imports: a library that has started threads can't be forked safely, and all sums depend on their number.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are all here, whatever the host's name resolves to

MODULES = (
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "h5py",
    "flipper.training.loop",
)

for module in MODULES:
    importlib.import_module(module)

# The first optimizer and this switch import torch._dynamo and torch._inductor: 3 s, once, here.
sys.modules["torch"].use_deterministic_algorithms(True)
