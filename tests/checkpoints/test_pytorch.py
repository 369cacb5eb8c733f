"""PyTorch zip files against torch itself: every bit that is read, and what torch sees after a strike."""

from __future__ import annotations

import argparse
import collections
import io
import os
import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch_makers import DTYPES, bits_of, deflated, flat_names, random_tensor, saved_bytes, training_state

from flipper.checkpoints import Checkpoint, open_checkpoint
from flipper.checkpoints.elements import byte_masks, combine
from flipper.checkpoints.tree import Leaf, Opaque
from flipper.errors import CheckpointError
from flipper.faults.overlap import distinct_elements

# torch calls complex32, sparse and quantised tensors and TorchScript experimental or deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

KINDS = ("zip", "legacy", "deflated")


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def made(folder: Path, value, kind: str = "zip") -> Path:
    """The value as a file of one of KINDS."""
    path = folder / "model.pt"
    torch.save(value, path, _use_new_zipfile_serialization=kind != "legacy")
    return deflated(path, folder / "deflated.pt") if kind == "deflated" else path


def read_all(checkpoint: Checkpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensor(name)
    streamed = np.concatenate([*checkpoint.blocks(tensor), np.zeros(0, np.uint64)])
    backwards = checkpoint.read_bits(tensor, np.arange(tensor.elements)[::-1].copy())[::-1]
    assert np.array_equal(streamed, backwards)
    return streamed


def assert_same_bits(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(path) as checkpoint:
        names = {name for tensor in checkpoint.tensors for name in tensor.names}
        assert names == set(expected)
        for name, tensor in expected.items():
            assert np.array_equal(read_all(checkpoint, name), bits_of(tensor)), name


def strike(path: Path, name: str, flat: list[int], xor: list[int]) -> None:
    """XOR elements of a tensor in the file itself, as an injection does."""
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor(name)
        indexes, change = np.array(flat), np.array(xor, np.uint64)
        if not tensor.place.patchable:
            checkpoint.rewrite(path, "", [(tensor, indexes, change)])
            return
        places, masks = [], []
        for part in tensor.place.locate(tensor.dims, tensor.layout, indexes):
            found = byte_masks(part.offsets, change[part.where], tensor.layout, part.order, part.shifts)
            places.append(found[0])
            masks.append(found[1])
        offsets, bytes_ = combine(np.concatenate(places), np.concatenate(masks))
        repairs = checkpoint.checksum_masks("", offsets, bytes_)
    data = bytearray(path.read_bytes())
    for where, mask in [(offsets, bytes_), repairs]:
        for offset, value in zip(where.tolist(), mask.tolist(), strict=True):
            data[offset] ^= value
    path.write_bytes(data)


def assert_only_struck(path: Path, before: dict[str, torch.Tensor], name: str, flat: list[int], xor: list[int]) -> None:
    """torch sees exactly the elements changed that were struck, and zip tools find no wrong checksum."""
    after = flat_names(torch.load(path, weights_only=False))
    assert list(after) == list(before)
    for other, tensor in before.items():
        expected = bits_of(tensor).copy()
        if other == name:
            expected[flat] ^= np.array(xor, np.uint64)
        assert np.array_equal(bits_of(after[other]), expected), other
    if zipfile.is_zipfile(path):
        assert zipfile.ZipFile(path).testzip() is None
        if shutil.which("unzip"):
            subprocess.run(["unzip", "-tqq", path], check=True, capture_output=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reads_as_torch_wrote_it(tmp_path, kind, dtype):
    tensor = random_tensor(dtype, (3, 5))
    path = made(tmp_path, {"w": tensor, "empty": tensor[:0], "scalar": tensor[0, 0].clone()}, kind)
    assert_same_bits(path, {"w": tensor, "empty": tensor[:0], "scalar": tensor[0, 0]})
    assert open_checkpoint(path).tensor("w").dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "uint16", "int64"])
def test_views_read_and_strike_through_their_strides(tmp_path, kind, dtype):
    if kind == "legacy" and dtype == "uint16":
        pytest.skip("torch.load can't read back what it wrote")
    base = random_tensor(dtype, (6, 4, 2))
    views = {
        "turned": base.permute(2, 0, 1), "step": base[::2, 1:], "expanded": base[:, :1].expand(6, 3, 2),
        "row": base[4], "tail": base.reshape(-1)[7:].as_strided((3, 2), (4, 9)),
    }  # fmt: skip
    path = made(tmp_path, views, kind)
    loaded = flat_names(torch.load(path))
    assert_same_bits(path, loaded)
    strike(path, "step", [5], [1 << 3])
    after = flat_names(torch.load(path))["step"]
    expected = bits_of(views["step"]).copy()
    expected[5] ^= 1 << 3
    assert np.array_equal(bits_of(after), expected)


def test_a_training_state_reads_whole_and_strikes_alone(tmp_path, kind):
    state = training_state()
    path = made(tmp_path, state, kind)
    before = flat_names(torch.load(path))
    assert_same_bits(path, before)
    for name, flat, xor in [("model.0.weight", [0, 5, 11], [1, 0x80000000, 0x40000001]),
                            ("optimizer.state.3.exp_avg", [2], [0xFF])]:  # fmt: skip
        before = flat_names(torch.load(path))
        strike(path, name, flat, xor)
        assert_only_struck(path, before, name, flat, xor)


def test_the_tree_is_what_was_saved(tmp_path, kind):
    state = {"a": [1, (torch.ones(2), None)], 3: {"x": 1.5, True: "t"}, "b": b"raw", "c": 2 + 1j, "big": 1 << 80}
    checkpoint = open_checkpoint(made(tmp_path, state, kind))
    assert checkpoint.tree() == {
        "a": [1, (Leaf("a.1.0"), None)], 3: {"x": 1.5, True: "t"}, "b": b"raw", "c": 2 + 1j, "big": 1 << 80
    }  # fmt: skip


def test_tied_tensors_are_one_under_the_first_name(tmp_path, kind):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    checkpoint = open_checkpoint(made(tmp_path, {"head": weight, "emb": weight, "part": weight[1:]}, kind))
    assert {tensor.name: tensor.aliases for tensor in checkpoint.tensors} == {"emb": ("head",), "part": ()}
    assert checkpoint.tree()["head"] == Leaf("head", parameter=True)


def test_a_whole_module_reads_as_its_state_dict(tmp_path, kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    )
    path = made(tmp_path, {"net": model, "args": argparse.Namespace(lr=0.1, layers=[1, 2])}, kind)
    expected = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    assert_same_bits(path, expected)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tree()["args"] == {"lr": 0.1, "layers": [1, 2]}
    assert checkpoint.notes == ()
    assert checkpoint.tensor("net.0.weight").role == "parameter"


def test_a_recurrent_module_lists_its_weights_once(tmp_path):
    model = torch.nn.LSTM(2, 3)
    assert_same_bits(made(tmp_path, model), model.state_dict())


def test_raw_storages_are_tensors_with_one_axis(tmp_path, kind):
    halves = torch.arange(3).half()
    path = made(tmp_path, {"typed": halves.storage(), "untyped": halves.clone().untyped_storage()}, kind)
    assert_same_bits(path, {"typed": halves, "untyped": halves.view(torch.uint8)})


class Tagged(torch.Tensor):
    """A subclass with nothing of its own."""


def test_subclasses_attributes_and_bare_tensors_read(tmp_path, kind):
    tensor = torch.arange(4.0)
    tagged = torch.arange(3.0).as_subclass(Tagged)
    noted = torch.nn.Parameter(torch.ones(2))
    noted.note = "x"
    path = made(tmp_path, {"tagged": tagged, "noted": noted}, kind)
    assert_same_bits(path, {"tagged": torch.arange(3.0), "noted": noted})
    assert any("Tagged" in note for note in open_checkpoint(path).notes)
    assert_same_bits(made(tmp_path, tensor, kind), {"tensor": tensor})


def test_wrappers_read_as_the_tensors_inside(tmp_path, kind):
    wrapper = TwoTensor(torch.arange(3.0), torch.ones(3))
    path = made(tmp_path, {"pair": wrapper, "w": torch.nn.Parameter(torch.zeros(1))}, kind)
    assert_same_bits(path, {"pair.a": torch.arange(3.0), "pair.b": torch.ones(3), "w": torch.zeros(1)})


def test_numpy_scalars_are_scalars_and_arrays_are_listed_as_unsupported(tmp_path, kind):
    state = {
        "f": np.float64(1.5), "i": np.int32(-3), "b": np.bool_(True), "h": np.float16(0.25), "c": np.complex128(1 - 2j),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3), "w": torch.ones(1),
        "d": collections.defaultdict(list, {"k": [1]}), "o": collections.OrderedDict(z=1, a=2),
    }  # fmt: skip
    checkpoint = open_checkpoint(made(tmp_path, state, kind))
    tree = checkpoint.tree()
    assert {key: tree[key] for key in "fibhcdo"} == {
        "f": 1.5, "i": -3, "b": True, "h": 0.25, "c": 1 - 2j, "d": {"k": [1]}, "o": {"z": 1, "a": 2}
    }  # fmt: skip
    array = checkpoint.tensor("array")
    assert not array.supported
    assert array.shape == (2, 3)
    assert "literals" in array.place.reason


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpy_arrays_are_listed_whatever_the_protocol(tmp_path, protocol):
    path = tmp_path / "model.pt"
    torch.save({"a": np.arange(6.0).reshape(2, 3), "w": torch.ones(1)}, path, pickle_protocol=protocol)
    checkpoint = open_checkpoint(path)
    array = checkpoint.tensor("a")
    assert (array.supported, array.dtype, array.shape) == (False, "numpy f8", (2, 3))
    assert checkpoint.notes == ()


class Described(dict):
    """A dict with attributes, one of them a tensor."""

    def __init__(self) -> None:
        self.mean = torch.full((2,), 9.0)


class Listed(list):
    """A list that can have attributes."""


def test_objects_list_their_attributes_and_what_they_contain(tmp_path, kind):
    described, listed = Described(), Listed([torch.ones(2), torch.zeros(1)])
    described["w"] = torch.arange(3.0)
    listed.scale = torch.full((3,), 2.0)
    path = made(tmp_path, {"d": described, "l": listed}, kind)
    expected = {
        "d.mean": described.mean, "d.w": described["w"], "l.0": listed[0], "l.1": listed[1], "l.scale": listed.scale,
    }  # fmt: skip
    assert_same_bits(path, expected)
    tree = open_checkpoint(path).tree()
    assert tree["d"] == {"mean": Leaf("d.mean"), "w": Leaf("d.w")}
    assert tree["l"] == {"scale": Leaf("l.scale"), 0: Leaf("l.0"), 1: Leaf("l.1")}


def test_tensors_that_are_attributes_of_tensors_are_listed(tmp_path, kind):
    parameter, plain, tagged = torch.nn.Parameter(torch.ones(2)), torch.zeros(3), torch.ones(4).as_subclass(Tagged)
    for number, tensor in enumerate((parameter, plain, tagged)):
        tensor.scale = torch.full((2,), float(number))
        tensor.note = "text"
    path = made(tmp_path, {"p": parameter, "t": plain, "s": tagged}, kind)
    assert torch.load(path, weights_only=False)["t"].scale.tolist() == [1.0, 1.0]
    expected = {"p": parameter, "p.scale": parameter.scale, "t": plain, "t.scale": plain.scale,
                "s": tagged.as_subclass(torch.Tensor), "s.scale": tagged.scale}  # fmt: skip
    assert_same_bits(path, expected)


def test_jagged_tensors_read_as_their_parts(tmp_path):
    rows = [torch.ones(2), torch.arange(3.0)]
    path = made(tmp_path, {"j": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    assert_same_bits(path, {"j.values": torch.cat(rows), "j.offsets": torch.tensor([0, 2, 5])})
    assert open_checkpoint(path).notes == ()


@pytest.mark.parametrize("axes", [33, 64])
def test_views_of_many_axes_are_read_and_struck(tmp_path, axes):
    """numpy counts up to 32 or 64 of them; those of length 1 don't matter."""
    whole = torch.arange(12.0).reshape(3, 4).t().reshape([4] + [1] * (axes - 2) + [3])
    pairs = torch.ones([1] * (axes - 1) + [2], dtype=torch.complex64).transpose(0, axes - 1)
    path = made(tmp_path, {"w": whole, "c": pairs})
    assert_same_bits(path, {"w": whole, "c": pairs})
    before = flat_names(torch.load(path))
    strike(path, "w", [5], [1 << 30])
    assert_only_struck(path, before, "w", [5], [1 << 30])


def test_a_stride_that_no_index_uses_can_be_any(tmp_path):
    """One that doubled, as for complex numbers, has more than 63 bits."""
    whole = torch.arange(3).to(torch.complex64)
    path = made(tmp_path, {"c": whole.as_strided((1, 2), ((1 << 62) + 1, 2))})
    assert_same_bits(path, {"c": whole[None, ::2]})


def test_quantised_and_sparse_tensors_read(tmp_path, kind):
    torch.manual_seed(0)
    dense = torch.randn(3, 4)
    per_tensor = torch.quantize_per_tensor(dense, 0.1, 2, torch.qint8)
    per_channel = torch.quantize_per_channel(
        dense, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.quint8
    )
    wide = torch.quantize_per_tensor(dense, 0.01, 0, torch.qint32)
    rows = torch.eye(3).to_sparse_csr()
    grid = torch.eye(3).to_sparse()
    path = made(tmp_path, {"q": per_tensor, "c": per_channel, "w": wide, "rows": rows, "grid": grid}, kind)
    assert_same_bits(path, {
        "q": per_tensor, "c": per_channel, "w": wide, "c.scales": per_channel.q_per_channel_scales(),
        "c.zero_points": per_channel.q_per_channel_zero_points(), "rows.crow_indices": rows.crow_indices(),
        "rows.col_indices": rows.col_indices(), "rows.values": rows.values(), "grid.indices": grid._indices(),
        "grid.values": grid._values(),
    })  # fmt: skip
    assert open_checkpoint(path).tensor("q").dtype == "qint8"


def test_four_bit_dtypes_are_read_low_bits_first(tmp_path):
    raw = torch.tensor([[0x21, 0x43], [0x65, 0x87]], dtype=torch.uint8)
    dense = torch.tensor([[0.0, 1, 2, 3], [4, 5, 6, 7]])
    quantised = torch.quantize_per_channel(dense, torch.ones(2), torch.zeros(2), 0, torch.quint4x2)
    path = made(tmp_path, {"f": raw.view(torch.float4_e2m1fn_x2), "q": quantised})
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensor("f").shape == (2, 4)
    assert checkpoint.tensor("f").dtype == "float4_e2m1fn"
    assert read_all(checkpoint, "f").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert read_all(checkpoint, "q").tolist() == list(range(8))
    strike(path, "f", [3], [0b0101])
    after = torch.load(path)["f"].view(torch.uint8)
    assert after.reshape(-1).tolist() == [0x21, 0x13, 0x65, 0x87]


def test_tensors_without_plain_bytes_are_listed_with_a_reason(tmp_path):
    values, others = torch.ones(2, 3, dtype=torch.complex64).clone(), torch.ones(3, dtype=torch.complex64)
    path = made(tmp_path, {"meta": torch.ones(2, device="meta"), "conj": values.conj(), "neg": others.conj().imag})
    checkpoint = open_checkpoint(path)
    assert {tensor.name: tensor.supported for tensor in checkpoint.tensors} == dict.fromkeys(
        ["conj", "meta", "neg"], False
    )
    assert "conj" in checkpoint.tensor("conj").place.reason


def test_torchscript_reads_parameters_and_constants(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 2)
            self.scale = torch.arange(2.0) + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    path = tmp_path / "script.pt"
    torch.manual_seed(0)
    model = Scaled()
    torch.jit.save(torch.jit.trace(model, torch.ones(1, 3)), str(path))
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "torchscript"
    assert_same_bits(
        path, {"inner.weight": model.inner.weight, "inner.bias": model.inner.bias, "constants.0": model.scale}
    )
    strike(path, "constants.0", [1], [1 << 31])
    loaded = torch.jit.load(str(path))
    assert torch.equal(loaded(torch.ones(1, 3)), model.inner(torch.ones(1, 3)) * torch.tensor([1.0, -2.0]))
    assert zipfile.ZipFile(path).testzip() is None


def test_big_endian_storages_are_read_from_the_other_end(tmp_path):
    path = made(tmp_path, {"w": torch.tensor([1.0, -2.5]), "c": torch.tensor([1 + 2j], dtype=torch.complex64)})
    swapped = tmp_path / "big.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("byteorder"):
                data = b"big"
            elif "/data/" in entry.filename:
                data = np.frombuffer(data, "<f4").astype(">f4").tobytes()
            new.writestr(entry.filename, data)
    assert_same_bits(swapped, {"w": torch.tensor([1.0, -2.5]), "c": torch.tensor([1 + 2j], dtype=torch.complex64)})
    before = flat_names(torch.load(swapped))
    strike(swapped, "w", [1], [0x80000001])
    assert_only_struck(swapped, before, "w", [1], [0x80000001])


def made_without_crcs(tmp_path, content):
    """What torch.save writes where it is told to leave out checksums: zeros in their place."""
    torch.serialization.set_crc32_options(False)
    try:
        return made(tmp_path, content)
    finally:
        torch.serialization.set_crc32_options(True)


def test_zero_crcs_stay_zero(tmp_path):
    path = made_without_crcs(tmp_path, {"w": torch.arange(8.0)})
    strike(path, "w", [3], [1 << 30])
    checkpoint = open_checkpoint(path)
    assert {entry.CRC for entry in zipfile.ZipFile(path).infolist()} == {0}
    assert list(checkpoint.problems()) == []


def test_zero_crcs_stay_zero_beside_an_entry_that_another_program_added_with_one(tmp_path):
    """Training frameworks append their metadata by zipfile, which knows of CRCs only."""
    path = made_without_crcs(tmp_path, {"w": torch.arange(8.0)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/notes.json", "{}")
    strike(path, "w", [3], [1 << 30])
    found = {entry.filename.split("/", 1)[1]: entry.CRC for entry in zipfile.ZipFile(path).infolist()}
    assert found.pop("notes.json") == zlib.crc32(b"{}")
    assert set(found.values()) == {0}
    assert list(open_checkpoint(path).problems()) == []


def test_bytes_behind_an_archive_are_told_and_kept(tmp_path):
    path = made(tmp_path, {"w": torch.arange(8.0)})
    with path.open("ab") as file:
        file.write(b"x" * 12)
    before = flat_names(torch.load(path))
    assert open_checkpoint(path).notes == ("12 bytes follow the archive; PyTorch doesn't read them",)
    strike(path, "w", [3], [1 << 30])
    assert_only_struck(path, before, "w", [3], [1 << 30])
    assert path.read_bytes().endswith(b"x" * 12)


def test_a_stale_crc_is_found_and_stays_stale(tmp_path):
    path = made(tmp_path, {"w": torch.arange(8.0), "x": torch.ones(2)})
    start = open_checkpoint(path).tensor("w").place.offset
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    assert any("data/0" in problem for problem in open_checkpoint(path).problems())
    strike(path, "w", [3], [1 << 30])
    assert any("data/0" in problem for problem in open_checkpoint(path).problems())


def test_rewriting_a_deflated_archive_keeps_the_rest_and_its_alignment(tmp_path):
    path = made(tmp_path, {"a": torch.arange(100.0), "b": torch.zeros(50), "c": torch.ones(7)})
    mixed = tmp_path / "mixed.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(mixed, "w") as new:
        new.comment = b"kept"
        for entry in old.infolist():
            info = zipfile.ZipInfo(entry.filename, (2020, 1, 2, 3, 4, 6))
            info.comment = b"note"
            info.compress_type = zipfile.ZIP_DEFLATED if entry.filename.endswith("data/1") else zipfile.ZIP_STORED
            if info.compress_type == zipfile.ZIP_STORED:
                pad = -(new.fp.tell() + 30 + len(info.filename) + 4) % 64
                info.extra = struct.pack("<HH", 0x4246, pad) + b"Z" * pad
            new.writestr(info, old.read(entry))
    before = flat_names(torch.load(mixed))
    os.chmod(mixed, 0o640)
    noise = list(range(50))
    xor = [(index * 2654435761) % (1 << 32) for index in noise]
    strike(mixed, "b", noise, xor)
    assert_only_struck(mixed, before, "b", noise, xor)
    assert mixed.stat().st_mode & 0o777 == 0o640
    checkpoint = open_checkpoint(mixed)
    assert checkpoint.tensor("c").place.offset % 64 == 0
    with zipfile.ZipFile(mixed) as archive:
        assert archive.comment == b"kept"
        assert {entry.comment for entry in archive.infolist()} == {b"note"}
        assert {entry.date_time for entry in archive.infolist()} == {(2020, 1, 2, 3, 4, 6)}
    assert sorted(os.listdir(tmp_path)) == ["mixed.pt", "model.pt"]


def test_old_files_with_long_streams_or_bytes_behind_them_are_read(tmp_path):
    state = {f"layer{index}.weight": torch.full((2,), float(index)) for index in range(1200)}
    path = made(tmp_path, state, "legacy")
    assert path.stat().st_size > 1 << 17
    assert_same_bits(path, state)
    with path.open("ab") as file:
        file.write(b"more")
    assert_same_bits(path, state)
    assert "4 bytes follow" in open_checkpoint(path).notes[0]


def test_overlapping_views_share_bytes_alike_in_files_and_in_deflated_entries(tmp_path):
    base = torch.arange(24.0)
    state = {"all": base, "left": base[:16].view(4, 4), "turned": base[4:20].view(4, 4).t(), "apart": torch.ones(3)}
    path = made(tmp_path, state)
    plain = distinct_elements(open_checkpoint(path).tensors)
    packed = distinct_elements(open_checkpoint(deflated(path, tmp_path / "packed.pt")).tensors)
    assert plain.keys() == packed.keys() >= {"left", "turned"}
    assert all(np.array_equal(plain[name], packed[name]) for name in plain)


def test_nothing_in_a_pickle_runs(tmp_path, kind):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    path = made(tmp_path, {"w": torch.ones(2), "evil": Evil()}, kind)
    checkpoint = open_checkpoint(path)
    assert not marker.exists()
    assert checkpoint.tree()["evil"] == Opaque(f"{os.system.__module__}.system")
    assert checkpoint.notes == (f"this file names {os.system.__module__}.system; nothing in it was run",)
    assert checkpoint.tensor("w").elements == 2


def test_a_view_beyond_its_storage_is_refused(tmp_path):
    data = saved_bytes({"w": torch.arange(6.0)})
    shape = b"K\x06\x85q"
    assert shape in data
    path = tmp_path / "reach.pt"
    path.write_bytes(data.replace(shape, b"K\x07\x85q", 1))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.reason == "header"
    assert "beyond" in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_truncation_anywhere_is_told_by_a_named_reason(tmp_path, legacy):
    data = saved_bytes({"w": torch.arange(3.0), "n": 1}, legacy)
    path = tmp_path / "cut.pt"
    for length in range(0, len(data), 1 if legacy else 3):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert caught.value.reason in ("truncated", "foreign"), length
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_random_damage_raises_nothing_but_named_reasons(tmp_path, legacy):
    data = saved_bytes({"w": torch.arange(3.0), "n": [1, 2.5, "x"], "h": torch.ones(2).half()}, legacy)
    generator = np.random.default_rng(7)
    path = tmp_path / "damaged.pt"
    for _ in range(600):
        damaged = bytearray(data)
        for _ in range(generator.integers(1, 6)):
            damaged[generator.integers(len(data))] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            with open_checkpoint(path) as checkpoint:
                checkpoint.tree()
                for tensor in checkpoint.tensors:
                    if tensor.supported and tensor.elements < 1000:
                        list(checkpoint.blocks(tensor))
                list(checkpoint.problems())
        except CheckpointError:
            pass


def test_beyond_four_gibibytes_offsets_and_checksums_hold(tmp_path):
    path = tmp_path / "huge.pt"
    written = (1 << 32) + (1 << 20)
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, content in _entries({"w": torch.arange(4.0)}):
            archive.writestr(name, content)
    _spread(path, written)
    with open_checkpoint(path) as checkpoint:
        start = checkpoint.tensor("w").place.offset
        assert start > 1 << 32
        assert read_all(checkpoint, "w").tolist() == bits_of(torch.arange(4.0)).tolist()
        offsets, masks = np.array([start + 7]), np.array([0x40], np.uint8)
        where, repair = checkpoint.checksum_masks("", offsets, masks)
    with path.open("r+b") as file:
        for offset, mask in [(start + 7, 0x40), *zip(where.tolist(), repair.tolist(), strict=True)]:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ mask]))
    with zipfile.ZipFile(path) as archive:
        entry = next(name for name in archive.namelist() if name.endswith("data/0"))
        expected = bytearray(torch.arange(4.0).numpy().tobytes())
        expected[7] ^= 0x40
        assert archive.read(entry) == bytes(expected)


def _entries(value) -> list[tuple[str, bytes]]:
    """Names and contents of a torch.save archive, the storages last."""
    with zipfile.ZipFile(io.BytesIO(saved_bytes(value))) as archive:
        found = [(name, archive.read(name)) for name in archive.namelist()]
    return sorted(found, key=lambda pair: "/data/" in pair[0])


def _spread(path: Path, gap: int) -> None:
    """Move the last entry and the central directory `gap` bytes back, leaving a hole in a sparse file."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        last, directory = archive.infolist()[-1].header_offset, archive.start_dir
        count = len(archive.infolist())
    records, at = b"", directory
    for index in range(count):
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        size = 46 + name + extra + comment
        record = bytearray(data[at : at + size])
        if index == count - 1:
            record[30:32] = struct.pack("<H", 12)
            record[42:46] = b"\xff" * 4
            record += struct.pack("<HHQ", 1, 8, last + gap)
        records += record
        at += size
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(records), directory + gap)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, directory + gap + len(records), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    with path.open("r+b") as file:
        file.truncate(last)
        file.seek(last + gap)
        file.write(data[last:directory] + records + end64 + locator + end)
