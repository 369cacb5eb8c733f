"""What ranks run in tests of checkpoints by torch.distributed.checkpoint."""

from __future__ import annotations

import resource

from flipper.training.loop import train_rank
from flipper.training.ranks import Emit, Place
from flipper.training.spec import TrainSpec


def train_with_small_files(spec: TrainSpec, most: int, place: Place, emit: Emit) -> None:
    """Train where the system takes no file of more bytes than this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    train_rank(spec, place, emit)
