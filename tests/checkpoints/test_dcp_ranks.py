"""DCP checkpoints that four ranks saved, under FSDP2, tensor parallelism and both: torch's own loader is the oracle."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import dcp_ranks
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch_makers import bits_of

from flipper.checkpoints import open_checkpoint
from flipper.checkpoints.convert import convert
from flipper.checkpoints.describe import describe
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.injection.diff import Unmatched, differences
from flipper.injection.inject import inject
from flipper.injection.undo import undo
from flipper.injection.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

LAYOUTS = [layout.__name__ for layout in dcp_ranks.LAYOUTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the ranks wrote: a directory for each layout, and the full tensors beside it."""
    path = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, dcp_ranks.__file__, path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one process without ranks loads."""
    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_reads_as_what_all_ranks_held_together(folder, layout):
    expected = torch.load(folder / f"{layout}.pt")
    with open_checkpoint(folder / layout) as checkpoint:
        assert {tensor.name for tensor in checkpoint.tensors} == expected.keys()
        assert checkpoint.notes == ()
        for name, tensor in expected.items():
            found = checkpoint.tensor(name)
            assert (found.supported, found.shape) == (True, tuple(tensor.shape)), name
            read = np.concatenate([*checkpoint.blocks(found, 8), np.zeros(0, np.uint64)])
            assert np.array_equal(read, bits_of(tensor)), name
        assert list(checkpoint.problems()) == []


def test_tensors_are_cut_as_the_layout_says(folder):
    """So that the other tests see what they mean to: parts of unequal sizes, ranks without a part, one copy of many."""
    with open_checkpoint(folder / "placements") as checkpoint:
        parts = {tensor.name: len(tensor.place.pieces) for tensor in checkpoint.tensors}
    assert {name: parts[name] for name in ("rows", "columns", "grid", "crossed", "few", "one", "copies", "hybrid")} == {
        "rows": 3, "columns": 4, "grid": 4, "crossed": 4, "few": 2, "one": 1, "copies": 1, "hybrid": 2,
    }  # fmt: skip


def test_lists_and_values_that_are_no_tensors_keep_their_places(folder):
    with open_checkpoint(folder / "placements") as checkpoint:
        tree = checkpoint.tree()
    assert (tree["number"], tree["pair"], [type(item).__name__ for item in tree["list"]]) == (
        7, (1, "x"), ["Leaf", "dict"]
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_strike_changes_what_is_loaded_at_the_recorded_elements_alone(folder, layout, tmp_path):
    source, target = folder / layout, tmp_path / "bad"
    before = loaded(source, torch.load(folder / f"{layout}.pt"))
    with open_checkpoint(source) as checkpoint:
        made = inject(checkpoint, target, draw(checkpoint, FaultModel(count=60), seed=3))
    after = loaded(target, before)
    expected = {name: bits_of(tensor) for name, tensor in before.items()}
    for row in made.table.rows():
        expected[row["tensor"]][row["flat"]] ^= np.uint64(int(row["mask"], 16))
    for name, tensor in after.items():
        assert np.array_equal(bits_of(tensor), expected[name]), name
    with open_checkpoint(source) as one, open_checkpoint(target) as other:
        found = list(differences(one, other))
        assert not [each for each in found if isinstance(each, Unmatched)]
        assert sum(len(each.flat) for each in found) == len(made.table)
    verdict = verify(target, made.path, source)
    assert (verdict.problems, verdict.complete) == ((), True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_and_undone_all_files_are_as_they_were(folder, layout, tmp_path):
    path = tmp_path / layout
    shutil.copytree(folder / layout, path)
    held = files(path)
    with open_checkpoint(path) as checkpoint:
        inject(checkpoint, None, draw(checkpoint, FaultModel(count=40), seed=5))
    assert files(path) != held
    undo(path)
    assert files(path) == held


def test_a_seed_strikes_the_same_elements_however_many_ranks_saved_them(folder):
    """Where names, dtypes and shapes are the same, cuts and files don't matter."""
    plans = []
    for layout in LAYOUTS[:3]:
        with open_checkpoint(folder / layout) as checkpoint:
            plans.append(list(draw(checkpoint, FaultModel(count=50), seed=9)))
    assert plans[0] == plans[1] == plans[2]


def test_a_sharded_checkpoint_converts_to_one_file(folder, tmp_path):
    expected = torch.load(folder / "fsdp2_and_tensor_parallel.pt")
    with open_checkpoint(folder / "fsdp2_and_tensor_parallel") as checkpoint:
        convert(checkpoint, tmp_path / "whole.pt", "pytorch")
    whole = torch.load(tmp_path / "whole.pt")
    assert torch.equal(whole["model"]["0.weight"], expected["model.0.weight"])
    assert torch.equal(whole["optim"]["state"]["2.weight"]["exp_avg"], expected["optim.state.2.weight.exp_avg"])
    assert whole["step"] == 1


def test_a_row_names_the_one_file_that_holds_its_tensor_and_none_where_there_are_several(folder):
    with open_checkpoint(folder / "placements") as checkpoint:
        rows = {tensor.name: describe(checkpoint, tensor) for tensor in checkpoint.tensors}
    assert (rows["rows"]["file"], rows["rows"]["offset"], rows["rows"]["storage"]) == (None, None, "sharded")
    data = (folder / "placements" / rows["whole"]["file"]).read_bytes()
    assert data[rows["whole"]["offset"] :].startswith(np.arange(4, dtype="<f4").tobytes())
