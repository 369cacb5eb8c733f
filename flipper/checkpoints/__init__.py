"""Where the bytes are: one module per container format, all behind the class Checkpoint."""

from flipper.checkpoints.checkpoint import Checkpoint
from flipper.checkpoints.formats import open_checkpoint
from flipper.checkpoints.tensor import Tensor

__all__ = ["Checkpoint", "Tensor", "open_checkpoint"]
