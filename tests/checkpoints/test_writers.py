"""The writers: torch, safetensors, h5py, zipfile and unzip read what they write, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import warnings
import zipfile

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from flipper import bits
from flipper.checkpoints.hdf5_layout import escape, name_of
from flipper.checkpoints.tree import Leaf, Opaque
from flipper.checkpoints.writers import Contents, TensorData, write
from flipper.errors import OutputError, UsageError

TORCH = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool, "complex128": torch.complex128, "complex64": torch.complex64, "complex32": torch.complex32,
    "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz, "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz, "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float4_e2m1fn": torch.float4_e2m1fn_x2,
}  # fmt: skip
SAFETENSORS = {
    "bool": "BOOL", "float4_e2m1fn": "F4", "float6_e2m3fn": "F6_E2M3", "float6_e3m2fn": "F6_E3M2", "uint8": "U8",
    "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "int16": "I16",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "uint16": "U16", "float16": "F16",
    "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32", "complex64": "C64", "float64": "F64",
    "int64": "I64", "uint64": "U64",
}  # fmt: skip
PLAIN = [name for name in bits.dtype_names() if not name.startswith(("qint", "quint"))]


def some(dtype: str, *shape: int, seed: int = 0) -> TensorData:
    """A tensor of random bytes (NaNs and all), of zeros and ones for bool."""
    size = TensorData(dtype, shape, list).nbytes
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size).astype(np.uint8)
    return TensorData.from_bytes(dtype, shape, raw.tobytes())


def flat(tensors: dict[str, TensorData], aliases: dict[str, str] | None = None) -> Contents:
    aliases = aliases or {}
    return Contents({name: Leaf(name) for name in (*tensors, *aliases)}, tensors, aliases)


def load(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls complex32 experimental
        return torch.load(path, **options)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().untyped_storage())


# PyTorch


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(3, 4), (2,), (0, 2), (2, 0, 2)])
@pytest.mark.parametrize("parameter", [False, True])
def test_torch_loads_every_dtype(tmp_path, dtype, shape, parameter):
    data = some(dtype, *shape)
    write(Contents({"w": Leaf("w", parameter)}, {"w": data}), tmp_path / "a.pt", "pytorch")
    w = load(tmp_path / "a.pt", weights_only=True)["w"]
    assert w.dtype == TORCH[dtype]
    assert tuple(w.shape) == ((*shape[:-1], shape[-1] // 2) if dtype == "float4_e2m1fn" else shape)
    assert w.is_contiguous()
    assert raw(w) == data.read()
    assert type(w) is (torch.nn.Parameter if parameter else torch.Tensor)
    assert w.requires_grad == (parameter and (w.dtype.is_floating_point or w.dtype.is_complex))


def test_torch_loads_nesting_scalars_and_optimizer_keys(tmp_path):
    tree = {
        "model": {"fc.weight": Leaf("model.fc.weight", True), "fc": {"scale": Leaf("model.fc.scale")}},
        "optimizer": {
            "state": {0: {"step": 3, "exp_avg": Leaf("optimizer.state.0.exp_avg")}, -1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "amsgrad": False, "foreach": None}],
        },
        "scalars": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**70, -(2**1000), 10**400, 1e300, -0.0],
        "rest": ("é\ud800", b"", b"\0\xff", 1 - 2j, (), [], {}, (1, 2, 3, 4), True, {(1, None): 2.5, 1.5: b"k"}),
    }
    names = ["model.fc.weight", "model.fc.scale", "optimizer.state.0.exp_avg"]
    tensors = {name: some("float32", 2, 3, seed=seed) for seed, name in enumerate(names)}
    write(Contents(tree, tensors), tmp_path / "a.pt", "pytorch")
    found = load(tmp_path / "a.pt", weights_only=True)
    leaves = [found["model"].pop("fc.weight"), found["model"]["fc"].pop("scale")]
    leaves.append(found["optimizer"]["state"][0].pop("exp_avg"))
    assert [raw(leaf) for leaf in leaves] == [tensors[name].read() for name in names]
    expected = {**tree, "model": {"fc": {}}}
    expected["optimizer"]["state"][0].pop("exp_avg")
    assert repr(found) == repr(expected)
    assert repr(load(tmp_path / "a.pt", weights_only=False)["rest"]) == repr(expected["rest"])


def test_tied_tensors_stay_tied_in_torch(tmp_path):
    contents = flat({"a": some("float32", 4), "c": some("float32", 4)}, {"b": "a"})
    write(contents, tmp_path / "a.pt", "pytorch")
    found = load(tmp_path / "a.pt")
    found["a"][0] = 7
    assert found["b"][0] == 7
    assert found["c"].data_ptr() != found["a"].data_ptr()


def test_the_zip_is_aligned_and_its_checksums_hold(tmp_path):
    path = tmp_path / "a.pt"
    write(flat({"a": some("uint8", 1001), "b": some("float32", 5), "empty": some("float32", 0)}), path, "pytorch")
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            crc, size, _, name, extra = struct.unpack_from("<14xLLLHH", content, info.header_offset)
            assert (crc, size) == (info.CRC, info.file_size)
            assert (info.header_offset + 30 + name + extra) % 64 == 0
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/version") == b"3\n"
    assert load(path, mmap=True)["b"].shape == (5,)
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tq", path], check=True, capture_output=True)


def test_a_large_entry_is_aligned_too(tmp_path, monkeypatch):
    """With 64-bit sizes the local header is 20 bytes longer."""
    monkeypatch.setattr("flipper.checkpoints.writers.pytorch.ZIP64_FROM", 1000)
    path = tmp_path / "a.pt"
    write(flat({"a": some("uint8", 1001), "b": some("float32", 5)}), path, "pytorch")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert archive.testzip() is None
    name, extra = struct.unpack_from("<26xHH", path.read_bytes(), info.header_offset)
    assert (info.header_offset + 30 + name + extra) % 64 == 0
    assert raw(load(path)["a"]) == some("uint8", 1001).read()


def test_names_that_nesting_does_not_spell_move_to_the_top(tmp_path):
    tree = {"conv1": {"weight": Leaf("conv1/weight")}, "epoch": 3, "fc": {"weight": Leaf("fc.weight", True)}}
    tensors = {"conv1/weight": some("float32", 2), "fc.weight": some("float32", 3)}
    write(Contents(tree, tensors), tmp_path / "a.pt", "pytorch")
    found = load(tmp_path / "a.pt")
    assert raw(found["conv1/weight"]) == tensors["conv1/weight"].read()
    assert raw(found["fc"]["weight"]) == tensors["fc.weight"].read()
    assert found["epoch"] == 3


@pytest.mark.parametrize(
    ("dtype", "shape", "told"),
    [
        ("float6_e2m3fn", (4,), "try --to hdf5"),
        ("float8_e3m4", (4,), "try --to hdf5"),
        ("float4_e2m1fn", (2, 3), "odd"),
        ("float4_e2m1fn", (), "odd"),
        ("qint8", (4,), "qint8"),
    ],
)
def test_torch_is_not_given_what_it_cannot_hold(tmp_path, dtype, shape, told):
    with pytest.raises(UsageError, match=told):
        write(flat({"w": some(dtype, *shape)}), tmp_path / "a.pt", "pytorch")
    assert os.listdir(tmp_path) == []


# safetensors


def header_of(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :], length


@pytest.mark.parametrize("dtype", SAFETENSORS)
@pytest.mark.parametrize("shape", [(3, 8), (0, 2), (4,)])
def test_safetensors_holds_every_dtype_of_its_own(tmp_path, dtype, shape):
    data = some(dtype, *shape)
    path = tmp_path / "a.safetensors"
    write(flat({"w": data}), path, "safetensors")
    with safe_open(path, "pt") as file:
        seen = file.get_slice("w")
        assert seen.get_dtype() == SAFETENSORS[dtype]
        assert tuple(seen.get_shape()) == shape
    header, body, length = header_of(path)
    begin, end = header["w"]["data_offsets"]
    assert body[begin:end] == data.read()
    assert length % 8 == 0


def test_safetensors_values_are_read_by_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"b": some("uint8", 3), "a": some("float64", 2, 2), "é.w": some("bfloat16", 5)}
    write(flat(tensors), path, "safetensors")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, data in tensors.items():
            assert raw(file.get_tensor(name).clone()) == data.read()


def test_tensors_are_aligned_by_their_width(tmp_path):
    path = tmp_path / "a.safetensors"
    write(flat({"a": some("uint8", 3), "b": some("float64", 2), "c": some("float16", 1)}), path, "safetensors")
    header, _, _ = header_of(path)
    offsets = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    assert offsets == {"b": 0, "c": 16, "a": 18}


def test_ties_are_recorded_as_save_model_does(tmp_path):
    path = tmp_path / "a.safetensors"
    write(flat({"a": some("float32", 2, 2)}, {"z": "a", "b": "a"}), path, "safetensors")
    header, _, _ = header_of(path)
    assert {key: header["__metadata__"][key] for key in ("z", "b")} == {"z": "a", "b": "a"}

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(2, 2))
            self.b = self.z = self.a

    from safetensors.torch import load_model

    module = Tied()
    assert load_model(module, str(path)) == (set(), [])
    assert raw(module.b) == some("float32", 2, 2).read()


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (flat({"w": some("complex128", 2)}), "complex128.*--to pytorch"),
        (flat({"w": some("complex32", 2)}), "complex32"),
        (flat({"w": some("float4_e2m1fn", 3)}), "no whole bytes"),
        (flat({"w": some("qint8", 3)}), "qint8"),
        (flat({"__metadata__": some("float32", 3)}), "called __metadata__"),
        (flat({"w": some("float32", 3)}, {"flipper_tree": "w"}), "called flipper_tree"),
        (flat({"\ud800": some("float32", 3)}), "Unicode"),
    ],
)
def test_safetensors_is_not_given_what_it_cannot_hold(tmp_path, contents, told):
    with pytest.raises(UsageError, match=told):
        write(contents, tmp_path / "a.safetensors", "safetensors")
    assert os.listdir(tmp_path) == []


# HDF5


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 2)])
def test_hdf5_holds_every_dtype_in_one_run_of_bytes(tmp_path, dtype, shape):
    data = some(dtype, *shape)
    path = tmp_path / "a.h5"
    write(flat({"w": data}), path, "hdf5")
    with h5py.File(path) as file:
        assert file.attrs["flipper_layout"] == "flipper-state/1"
        dataset = file["w"]
        packed = bits.layout(dtype).packed
        assert dataset.shape == ((data.nbytes,) if packed else shape)
        assert tuple(dataset.attrs.get("flipper_shape", dataset.shape)) == shape
        assert dataset.chunks is None
        start, size = dataset.id.get_offset(), dataset.id.get_storage_size()
    assert size == data.nbytes
    if size:
        assert path.read_bytes()[start : start + size] == data.read()


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int8", "int64", "uint16", "bool", "complex64", "complex128"]
)
def test_h5py_reads_common_dtypes_as_they_are(tmp_path, dtype):
    data = some(dtype, 3, 4)
    write(flat({"w": data}), tmp_path / "a.h5", "hdf5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["w"].dtype == np.dtype(dtype)
        assert file["w"][()].tobytes() == data.read()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_h5py_reads_short_floats_as_numbers(tmp_path, dtype):
    values = np.array([1.0, -0.5, 0.0, 3.0, 0.015625, 48.0]).astype(getattr(ml_dtypes, dtype))
    data = TensorData.from_bytes(dtype, (6,), values.tobytes())
    write(flat({"w": data}), tmp_path / "a.h5", "hdf5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["w"][()].astype(np.float64).tolist() == values.astype(np.float64).tolist()
        assert file["w"].attrs.get("flipper_dtype", "bfloat16") == dtype


def test_nested_keys_are_hdf5_paths_and_ties_hard_links(tmp_path):
    tree = {"model": {"fc.weight": Leaf("model.fc.weight"), "tied": [Leaf("model.tied.0")]}, "epoch": 3}
    contents = Contents(tree, {"model.fc.weight": some("float32", 2)}, {"model.tied.0": "model.fc.weight"})
    write(contents, tmp_path / "a.h5", "hdf5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["model/fc.weight"] == file["model/tied/0"]
        record = json.loads(file["flipper_tree"][()])
        assert record["dict"]["epoch"] == 3


@settings(max_examples=300)
@given(st.lists(st.text(st.characters(exclude_categories=())), min_size=1, max_size=4))
def test_any_keys_become_a_path_that_says_their_name(keys):
    components = [escape(key) for key in keys]
    assert name_of("/".join(components)) == ".".join(keys)
    for component in components:
        assert component not in ("", ".", "flipper_tree")
        assert "/" not in component
        component.encode("utf-8")
    assert len({escape(key) for key in keys}) == len(set(keys))


def test_odd_keys_are_written_and_found_again(tmp_path):
    keys = ["", ".", "..", "a/b", "%", "%2F", "flipper_tree", "é\ud800", "nul\0", "a.b"]
    tensors = {f"{key}.{inner}": some("uint8", 3, seed=n) for n, key in enumerate(keys) for inner in ("", "w")}
    tree = {key: {inner: Leaf(f"{key}.{inner}") for inner in ("", "w")} for key in keys}
    write(Contents(tree, tensors), tmp_path / "a.h5", "hdf5")
    found = {}
    with h5py.File(tmp_path / "a.h5") as file:
        for group in file.values():
            for dataset in group.values() if isinstance(group, h5py.Group) else ():
                found[name_of(dataset.name[1:])] = dataset[()].tobytes()
    assert found == {name: data.read() for name, data in tensors.items()}


@pytest.mark.parametrize(
    "tree",
    [
        {0: Leaf("0"), "0": {"x": Leaf("0.x")}},  # a dataset and a group at one path
        {"conv": {"x": Leaf("0.x")}, "0": Leaf("0")},  # keys that don't spell the name
    ],
)
def test_trees_that_are_no_paths_are_written_flat(tmp_path, tree):
    tensors = {"0": some("uint8", 2), "0.x": some("uint8", 3)}
    write(Contents(tree, tensors), tmp_path / "a.h5", "hdf5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert {name: file[name][()].tobytes() for name in tensors} == {n: d.read() for n, d in tensors.items()}


def test_hdf5_refuses_a_quantised_tensor(tmp_path):
    with pytest.raises(UsageError, match="qint8"):
        write(flat({"w": some("qint8", 3)}), tmp_path / "a.h5", "hdf5")


# All formats


@pytest.mark.parametrize("format", ["pytorch", "safetensors", "hdf5"])
def test_blocks_are_streamed_into_place(tmp_path, format):
    pieces = [bytes([n]) * 1000 for n in range(10)]
    data = TensorData("uint8", (10_000,), lambda: iter(pieces))
    write(flat({"w": data}), tmp_path / "a", format)
    assert b"".join(pieces) in (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("format", ["pytorch", "safetensors", "hdf5"])
def test_a_large_array_in_memory_is_written_in_pieces(tmp_path, format):
    """A large tensor of some shape, and an empty one whose shape a memoryview can't be cast from."""
    large = np.random.default_rng(5).standard_normal((300, 1001), np.float32)
    nothing = np.zeros((2, 0), np.float32)
    tensors = {
        name: TensorData.from_bytes("float32", array.shape, memoryview(array))
        for name, array in (("large", large), ("nothing", nothing))
    }
    assert max(map(len, tensors["large"].blocks())) < large.nbytes / 4
    write(flat(tensors), tmp_path / "a", format)
    assert large.tobytes() in (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("format", ["pytorch", "safetensors", "hdf5"])
def test_the_same_contents_give_the_same_bytes(tmp_path, format):
    contents = flat({"w": some("float32", 20), "v": some("bfloat16", 3)}, {"x": "w"})
    write(contents, tmp_path / "a", format)
    write(contents, tmp_path / "b", format)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("format", ["pytorch", "safetensors", "hdf5"])
def test_nothing_is_left_when_reading_fails_midway(tmp_path, format):
    def blocks():
        yield b"x" * 100
        raise OSError(5, "Input/output error")

    with pytest.raises(OutputError, match="Input/output error"):
        write(flat({"w": TensorData("uint8", (200,), blocks)}), tmp_path / "a", format)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", ["pytorch", "safetensors", "hdf5"])
@pytest.mark.parametrize("value", [{1}, Opaque("a.B")])
def test_foreign_values_are_refused(tmp_path, format, value):
    contents = Contents({"w": Leaf("w"), "odd": value}, {"w": some("uint8", 2)})
    if format != "pytorch" and isinstance(value, Opaque):
        return  # the record can hold it; contents_of decides
    with pytest.raises(UsageError, match="can't be carried"):
        write(contents, tmp_path / "a", format)
    assert os.listdir(tmp_path) == []


def test_an_unknown_format_lists_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match="safetensors, pytorch, hdf5"):
        write(flat({}), tmp_path / "a", "zarr")


@pytest.mark.parametrize("format", ["pytorch", "safetensors", "hdf5"])
def test_a_checkpoint_of_no_tensors_is_legal(tmp_path, format):
    write(Contents({"epoch": 1}, {}), tmp_path / "a", format)
    assert (tmp_path / "a").exists()


def test_a_buffer_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="needs 8 bytes, the buffer has 7"):
        TensorData.from_bytes("float32", (2,), b"1234567")
