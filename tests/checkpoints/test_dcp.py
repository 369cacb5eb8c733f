"""torch.distributed.checkpoint directories against torch: whole and cut tensors, and what loads after a strike."""

from __future__ import annotations

import enum
import io
import os
import pickle
import resource
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch_makers import bits_of, flat_names, random_tensor, saved_bytes, training_state

from flipper.checkpoints import open_checkpoint
from flipper.checkpoints.convert import convert
from flipper.checkpoints.dcp_pieces import Item, Items, Piece, Pieces, tile
from flipper.checkpoints.elements import byte_masks, combine
from flipper.checkpoints.tree import Leaf
from flipper.errors import CheckpointError
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.injection.diff import differences
from flipper.injection.inject import inject
from flipper.injection.verify import verify

# torch warns that saving and loading happens in a single process.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def saved(folder: Path, state) -> Path:
    path = folder / "checkpoint"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """What torch itself makes of the directory."""
    plain = path.parent / "plain.pt"
    dcp_to_torch_save(path, plain)
    return flat_names(torch.load(plain, weights_only=False))


def gridded(folder: Path, tensors: dict[str, torch.Tensor], cuts: dict[str, tuple[int, ...]]) -> Path:
    """A directory as FSDP with tensor parallelism writes it: each tensor cut into a grid, over two files.

    cuts: by name, into how many parts each axis is cut. Items are torch.save archives back to back.
    """
    path = folder / "grid"
    path.mkdir()
    files = {name: io.BytesIO() for name in ("__0_0.distcp", "__1_0.distcp")}
    described, places = {}, {}
    for name, tensor in tensors.items():
        chunks = []
        edges = [np.array_split(np.arange(size), parts) for size, parts in zip(tensor.shape, cuts[name], strict=True)]
        for number, block in enumerate(np.ndindex(*cuts[name])):
            rows = [edge[index] for edge, index in zip(edges, block, strict=True)]
            offsets = torch.Size(
                int(row[0]) if len(row) else size for row, size in zip(rows, tensor.shape, strict=True)
            )
            part = tensor[tuple(slice(int(row[0]), int(row[-1]) + 1) if len(row) else slice(0, 0) for row in rows)]
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
            file = ("__0_0.distcp", "__1_0.distcp")[number % 2]
            data = saved_bytes(part.clone())
            start = files[file].tell()
            files[file].write(data)
            info = dcp.filesystem._StorageInfo(file, start, len(data))
            places[MetadataIndex(name, offsets, number)] = info
        described[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for file, stream in files.items():
        (path / file).write_bytes(stream.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(described, None, places)))
    return path


def read_all(checkpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensor(name)
    return np.concatenate([*checkpoint.blocks(tensor, 64), np.zeros(0, np.uint64)])


def strike(path: Path, name: str, flat: list[int], xor: list[int]) -> None:
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor(name)
        change = np.array(xor, np.uint64)
        found: dict[str, list] = {}
        for part in tensor.place.locate(tensor.dims, tensor.layout, np.array(flat)):
            masks = byte_masks(part.offsets, change[part.where], tensor.layout, part.order, part.shifts)
            found.setdefault(part.file, []).append(masks)
        for file, parts in found.items():
            offsets, masks = combine(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
            where, repair = checkpoint.checksum_masks(file, offsets, masks)
            data = bytearray((path / file).read_bytes())
            for places, values in [(offsets, masks), (where, repair)]:
                for place, value in zip(places.tolist(), values.tolist(), strict=True):
                    data[place] ^= value
            (path / file).write_bytes(data)


class Python3110(pickle.Pickler):
    """Writes enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_enumerations_are_read_as_any_python_writes_them(tmp_path):
    path = saved(tmp_path, training_state())
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    with open(path / ".metadata", "wb") as file:
        Python3110(file).dump(metadata)
    assert b"getattr" in (path / ".metadata").read_bytes()
    checkpoint = open_checkpoint(path)
    assert checkpoint.notes == ()
    for name, tensor in loaded(path).items():
        assert np.array_equal(read_all(checkpoint, name), bits_of(tensor)), name


def test_a_training_state_reads_as_torch_loads_it(tmp_path):
    path = saved(tmp_path, training_state())
    expected = loaded(path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "dcp"
    assert {tensor.name for tensor in checkpoint.tensors} == set(expected)
    assert checkpoint.notes == ()
    for name, tensor in expected.items():
        assert np.array_equal(read_all(checkpoint, name), bits_of(tensor)), name
    tree = checkpoint.tree()
    assert tree["epoch"] == 2
    assert tree["best"] == 0.5
    assert tree["tag"] == "x"
    assert tree["model"]["0.weight"] == Leaf("model.0.weight")
    assert list(checkpoint.problems()) == []


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "complex64", "bool", "int64", "float8_e4m3fn"])
def test_every_kind_of_cut_reads_whole(tmp_path, dtype):
    tensors = {
        "rows": random_tensor(dtype, (7, 5)), "columns": random_tensor(dtype, (4, 6)),
        "grid": random_tensor(dtype, (5, 4, 3)), "whole": random_tensor(dtype, (3,)),
        "scalar": random_tensor(dtype, ()), "some_empty": random_tensor(dtype, (2, 2)),
    }  # fmt: skip
    cuts = {"rows": (3, 1), "columns": (1, 2), "grid": (2, 2, 1), "whole": (1,), "scalar": (), "some_empty": (3, 1)}
    path = gridded(tmp_path, tensors, cuts)
    checkpoint = open_checkpoint(path)
    for name, tensor in tensors.items():
        assert np.array_equal(read_all(checkpoint, name), bits_of(tensor)), name
    assert checkpoint.tensor("whole").place.storage == "plain"
    assert checkpoint.tensor("grid").place.storage == "sharded"
    assert checkpoint.tensor("grid").place.offset is None


def test_the_plain_place_of_a_whole_tensor_is_in_its_file(tmp_path):
    path = saved(tmp_path, {"w": torch.arange(5.0)})
    place = open_checkpoint(path).tensor("w").place
    data = (path / place.file).read_bytes()
    assert data[place.offset : place.offset + 20] == torch.arange(5.0).numpy().tobytes()


def test_a_tensor_without_elements_is_equal_to_itself_in_another_format(tmp_path):
    """It has no bytes, which is all there is to read, compare and convert."""
    state = {"empty": torch.empty(0, 3), "w": torch.ones(2)}
    path = saved(tmp_path, state)
    torch.save(state, tmp_path / "a.pt")
    with open_checkpoint(path) as checkpoint, open_checkpoint(tmp_path / "a.pt") as other:
        empty = checkpoint.tensor("empty")
        assert (empty.supported, empty.shape, empty.place.storage, empty.place.offset) == (True, (0, 3), "plain", None)
        assert len(read_all(checkpoint, "empty")) == 0
        assert len(checkpoint.read_bits(empty, np.zeros(0, np.int64))) == 0
        assert list(differences(checkpoint, other)) == []
        convert(checkpoint, tmp_path / "b.pt", "pytorch")
    back = torch.load(tmp_path / "b.pt")
    assert back.keys() == state.keys()
    assert back["empty"].shape == (0, 3)


def test_a_strike_changes_its_elements_alone_and_every_crc_follows(tmp_path):
    tensors = {"w": torch.randn(6, 4), "v": torch.randn(3)}
    path = gridded(tmp_path, tensors, {"w": (2, 2), "v": (1,)})
    flat, xor = [0, 3, 13, 23], [1, 0x80000000, 0x40000000, 0xFF]
    strike(path, "w", flat, xor)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    expected = bits_of(tensors["w"]).copy()
    expected[flat] ^= np.array(xor, np.uint64)
    assert np.array_equal(bits_of(state["w"]), expected)
    assert torch.equal(state["v"], tensors["v"])
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        item = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None


def test_a_stale_crc_in_an_item_is_a_problem(tmp_path):
    path = saved(tmp_path, {"w": torch.arange(5.0)})
    place = open_checkpoint(path).tensor("w").place
    data = bytearray((path / place.file).read_bytes())
    data[place.offset] ^= 1
    (path / place.file).write_bytes(data)
    assert len(list(open_checkpoint(path).problems())) == 1


def test_items_in_safetensors_files_are_read(tmp_path):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    state = {"a": torch.arange(3.0), "b": torch.ones(2, 2).half()}
    writer = FileSystemWriter(tmp_path / "st", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    checkpoint = open_checkpoint(tmp_path / "st")
    for name, tensor in state.items():
        assert np.array_equal(read_all(checkpoint, name), bits_of(tensor))


def test_without_metadata_it_is_an_aborted_save(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(2)})
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="aborted") as caught:
        open_checkpoint(path)
    assert caught.value.reason == "missing-shard"


def test_a_missing_or_short_data_file_is_told(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(2)})
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.reason == "truncated"
    file.unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.reason == "missing-shard"


def changed_metadata(path: Path, change) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_transformed_items_are_listed_as_unsupported(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(2)})

    def change(metadata):
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["zstd"]

    changed_metadata(path, change)
    tensor = open_checkpoint(path).tensor("w")
    assert not tensor.supported
    assert "codec" in tensor.place.reason


@pytest.mark.parametrize("outside", ["../secret.distcp", "/etc/hostname"])
def test_files_outside_the_directory_are_refused(tmp_path, outside):
    path = saved(tmp_path, {"w": torch.ones(2)})
    shutil.copy(path / "__0_0.distcp", tmp_path / "secret.distcp")

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = outside

    changed_metadata(path, change)
    with pytest.raises(CheckpointError, match="outside") as caught:
        open_checkpoint(path)
    assert caught.value.reason == "header"


def test_chunks_that_do_not_cover_a_tensor_once_are_refused(tmp_path):
    path = gridded(tmp_path, {"w": torch.randn(6, 4)}, {"w": (2, 1)})

    def change(metadata):
        chunk = metadata.state_dict_metadata["w"].chunks[1]
        chunk.sizes = torch.Size([2, 4])

    changed_metadata(path, change)
    with pytest.raises(CheckpointError, match="exactly once"):
        open_checkpoint(path)


def test_an_item_that_holds_something_else_is_refused_when_it_is_read(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(2)})

    def change(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.int32

    changed_metadata(path, change)
    with pytest.raises(CheckpointError, match="holds float32"):
        read_all(open_checkpoint(path), "w")


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_nothing_in_the_metadata_runs(tmp_path):
    path = saved(tmp_path, {"w": torch.ones(2)})
    marker = tmp_path / "ran"
    changed_metadata(path, lambda metadata: setattr(metadata, "storage_meta", Evil(marker)))
    checkpoint = open_checkpoint(path)
    assert not marker.exists()
    assert "system" in checkpoint.notes[0]


def test_random_damage_of_the_metadata_raises_nothing_but_named_reasons(tmp_path):
    path = gridded(tmp_path, {"w": torch.randn(6, 4), "v": torch.ones(2)}, {"w": (2, 1), "v": (1,)})
    original = (path / ".metadata").read_bytes()
    generator = np.random.default_rng(5)
    for _ in range(400):
        damaged = bytearray(original)
        for _ in range(generator.integers(1, 5)):
            damaged[generator.integers(len(damaged))] = generator.integers(256)
        (path / ".metadata").write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.tree()
            for tensor in checkpoint.tensors:
                if tensor.supported and tensor.elements < 1000:
                    list(checkpoint.blocks(tensor))
        except CheckpointError:
            pass


def test_more_items_are_struck_than_files_can_be_open(tmp_path):
    path = saved(tmp_path, {f"l{number}.w": torch.ones(2) for number in range(80)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with open_checkpoint(path) as checkpoint:
            plan = draw(checkpoint, FaultModel(count=1, spread="per-layer"), seed=1)
            made = inject(checkpoint, tmp_path / "bad", plan)
        verdict = verify(tmp_path / "bad", made.path, path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (len(made.table), verdict.problems, verdict.complete) == (80, (), True)


def piece(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Piece:
    return Piece(offsets, sizes, Item("x", 0, 1))


def cut_up(random: np.random.Generator, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Piece]:
    """A box cut in two along some axis, and its parts again, until chance ends it."""
    if random.random() < 0.3 or max(sizes) == 1:
        return [piece(offsets, sizes)]
    axis = int(random.choice([axis for axis, size in enumerate(sizes) if size > 1]))
    at = int(random.integers(1, sizes[axis]))
    parts = [(0, at), (at, sizes[axis] - at)]
    return [
        each
        for begin, size in parts
        for each in cut_up(
            random,
            tuple(offset + begin * (a == axis) for a, offset in enumerate(offsets)),
            tuple(size if a == axis else old for a, old in enumerate(sizes)),
        )
    ]


def owners_one_by_one(pieces: tuple[Piece, ...], index: tuple[int, ...]) -> list[int]:
    return [
        number
        for number, each in enumerate(pieces)
        if all(o <= i < o + s for i, o, s in zip(index, each.offsets, each.sizes, strict=True))
    ]


def test_pieces_in_no_grid_are_told_from_those_that_overlap_or_leave_holes():
    random = np.random.default_rng(1)
    seen = []
    for _ in range(400):
        shape = tuple(random.integers(1, 5, 3).tolist())
        pieces = cut_up(random, (0, 0, 0), shape)
        if random.random() < 0.5:
            number = int(random.integers(len(pieces)))
            moved = tuple(max(0, offset + int(random.integers(-1, 2))) for offset in pieces[number].offsets)
            pieces[number] = piece(moved, pieces[number].sizes)
        pieces = tuple(sorted(pieces, key=lambda each: each.offsets))
        indexes = list(np.ndindex(*shape))
        owners = [owners_one_by_one(pieces, index) for index in indexes]
        inside = all(o + s <= n for e in pieces for o, s, n in zip(e.offsets, e.sizes, shape, strict=True))
        whole = inside and all(len(found) == 1 for found in owners)
        assert tile(pieces, shape) == whole
        seen.append(whole)
        if whole:
            place = Pieces(pieces, "w", "float32", Items({}))
            for number, where in place._owners(tuple(np.array(indexes).T)):
                assert all(owners[row] == [pieces.index(number)] for row in where)
    assert 100 < sum(seen) < 350


@pytest.mark.parametrize("told", ["no grid", "too many"])
def test_chunks_that_would_take_hours_to_compare_are_refused(told):
    if told == "no grid":  # each row is cut at another place: 25 million cells
        rows = range(1, 5000)
        pieces = [piece((row, 0), (1, row)) for row in rows] + [piece((row, row), (1, 5000 - row)) for row in rows]
        pieces.append(piece((0, 0), (1, 5000)))
        shape: tuple[int, ...] = (5000, 5000)
    else:  # every axis is cut once
        shape = (2,) * 14
        pieces = [piece(index, (1,) * 14) for index in np.ndindex(*shape)]
    with pytest.raises(ValueError, match=told):
        tile(tuple(pieces), shape)
