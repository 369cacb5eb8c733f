"""Writes small folders in the format of CIFAR-10's python version."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")


def batch(number: int, images: int = 64) -> dict[bytes, object]:
    """Noise around a brightness that tells the label, so that there is something to learn."""
    draw = np.random.RandomState(number)
    labels = np.arange(images) % 10
    data = draw.randint(0, 106, (images, 3072)) + 15 * labels[:, None]
    return {
        b"batch_label": b"of a test",
        b"labels": labels.tolist(),
        b"data": data.astype(np.uint8),
        b"filenames": [b"%d.png" % each for each in range(images)],
    }


def write(folder: Path, images: int = 64, protocol: int = 2) -> Path:
    """All six files in folder/cifar-10-batches-py; returns that folder."""
    place = folder / "cifar-10-batches-py"
    place.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (place / name).write_bytes(pickle.dumps(batch(number, images), protocol))
    return place
