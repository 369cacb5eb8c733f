"""Manifests of very many faults: their rows go to a .npz file beside them."""

import json
from pathlib import Path

import numpy as np

from flipper.checkpoints import open_checkpoint
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.injection.inject import inject

SAMPLE = Path(__file__).parent.parent.parent / "sample_checkpoints" / "digits-cnn.safetensors"


def test_the_table_of_a_long_manifest_says_what_was_struck(tmp_path: Path) -> None:
    """Every row's bytes before and after are those of the two files, and numpy alone can read the table."""
    out = tmp_path / "out.safetensors"
    with open_checkpoint(SAMPLE) as checkpoint:
        inject(checkpoint, out, draw(checkpoint, FaultModel(dtypes=["float32"], count=20_000), seed=3))
    document = json.loads((tmp_path / "out.safetensors.flipper.json").read_text())
    with np.load(tmp_path / document["faults"]["file"]) as table:
        columns = dict(table)
    assert {"tensor", "flat", "op", "mask", "value", "before", "after", "file", "offset"} <= set(columns)
    assert document["faults"]["count"] == len(columns["flat"]) > 10_000
    old, new = (np.frombuffer(path.read_bytes(), np.uint8) for path in (SAMPLE, out))
    for name, data in (("before", old), ("after", new)):
        found = np.stack([data[columns["offset"].astype(np.int64) + i] for i in range(4)], axis=1)
        assert np.array_equal(found.reshape(-1).view("<u4"), columns[name])
    assert np.count_nonzero(old != new) == np.count_nonzero((columns["mask"].view(np.uint8)) != 0)
