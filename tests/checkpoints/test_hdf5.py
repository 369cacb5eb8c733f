"""HDF5 files: every kind of dataset is read and struck as h5py sees it, or listed with the reason why it can't be."""

from __future__ import annotations

import fcntl
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hdf5_tools import contents, strike, xored

from flipper.checkpoints import hdf5_chunks
from flipper.checkpoints.formats import open_checkpoint
from flipper.checkpoints.hdf5 import Hdf5File
from flipper.checkpoints.hdf5_headers import checksum
from flipper.checkpoints.tensor import Extent
from flipper.checkpoints.tree import Leaf
from flipper.errors import CheckpointError, FlipperError

RANDOM = np.random.default_rng(5)


def custom_float(width: int, exponent: int, mantissa: int, bias: int) -> Any:
    """An HDF5 float type of `width` bits."""
    datatype = h5py.h5t.IEEE_F32LE.copy()
    datatype.set_fields(width - 1, mantissa, exponent, 0, mantissa)
    datatype.set_precision(width)
    datatype.set_ebias(bias)
    datatype.set_size(width // 8)
    return datatype


def raw_dataset(file: Any, name: str, datatype: Any, shape: tuple[int, ...]) -> None:
    """A dataset of any HDF5 type, with random bytes for elements."""
    dataset = h5py.h5d.create(file.id, name.encode(), datatype, h5py.h5s.create_simple(shape))
    data = RANDOM.integers(0, 256, int(np.prod(shape)) * datatype.get_size()).astype(np.uint8)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, data, datatype)


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Random bytes as an array."""
    itemsize = np.dtype(dtype).itemsize
    data = RANDOM.integers(0, 256, math.prod(shape) * itemsize).astype(np.uint8)
    return data.view(dtype).reshape(shape)


Fill = Callable[[Any], object]


def plain(dtype: str, shape: tuple[int, ...] = (3, 4), **options: Any) -> Fill:
    """Makes `a/w` of random bytes."""
    return lambda file: file.create_dataset("a/w", data=numbers(shape, dtype), **options)


def chunked(dtype: str, **options: Any) -> Fill:
    """Makes `a/w` of random bytes in chunks that don't divide its shape."""
    return plain(dtype, (7, 10), chunks=(3, 4), **options)


def typed(*fields: int) -> Fill:
    """Makes `a/w` of a custom float."""
    return lambda file: raw_dataset(file["a"], "w", custom_float(*fields), (3, 4))


def exact(array: np.ndarray[Any, Any]) -> Fill:
    """Makes `a/w` of an array."""
    return lambda file: file.create_dataset("a/w", data=array)


KINDS: dict[str, tuple[Fill, str, str, str]] = {
    "float32": (plain("<f4"), "float32", "little", "plain"),
    "float64": (plain("<f8"), "float64", "little", "plain"),
    "float16": (plain("<f2"), "float16", "little", "plain"),
    "big-endian": (plain(">f4"), "float32", "big", "plain"),
    "int64": (plain("<i8"), "int64", "little", "plain"),
    "uint16-big": (plain(">u2"), "uint16", "big", "plain"),
    "bool": (exact(np.ones((3, 4), bool)), "bool", "little", "plain"),
    "complex64": (plain("<c8"), "complex64", "little", "plain"),
    "complex128-big": (plain(">c16"), "complex128", "big", "plain"),
    "scalar": (exact(np.array(1.5, np.float32)), "float32", "little", "plain"),
    "six-axes": (plain("<f4", (2, 1, 3, 2, 2, 2)), "float32", "little", "plain"),
    "bfloat16-fields": (typed(16, 8, 7, 127), "bfloat16", "little", "plain"),
    "bfloat16-opaque": (exact(np.ones((3, 4), ml_dtypes.bfloat16)), "bfloat16", "little", "plain"),
    "float8-e4m3": (typed(8, 4, 3, 7), "float8_e4m3fn", "little", "plain"),
    "float8-e5m2": (typed(8, 5, 2, 15), "float8_e5m2", "little", "plain"),
    "chunked": (chunked("<f4"), "float32", "little", "chunked"),
    "chunked-big": (chunked(">f8"), "float64", "big", "chunked"),
    "chunked-complex": (chunked("<c8"), "complex64", "little", "chunked"),
    "chunked-5d": (plain("<f2", (3, 2, 5, 3, 4), chunks=(2, 2, 3, 2, 3)), "float16", "little", "chunked"),
    "extendable": (chunked("<f4", maxshape=(None, None)), "float32", "little", "chunked"),
    "filtered-32d": (
        plain("<f4", (1,) * 28 + (2, 3, 1, 2), chunks=(1,) * 28 + (1, 2, 1, 2), compression="gzip"),
        "float32", "little", "filtered",
    ),
    "filtered-complex": (chunked(">c16", compression="gzip"), "complex128", "big", "filtered"),
}  # fmt: skip


@pytest.fixture(params=[{}, {"userblock_size": 1024}, {"libver": "latest"}], ids=["plain", "userblock", "latest"])
def layout(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Ways to lay out a file."""
    options: dict[str, Any] = request.param
    return options


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_and_struck_exactly(kind: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """The elements are those that h5py reads, and a strike changes those asked for and no other dataset."""
    make, dtype, order, storage = KINDS[kind]
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", **layout) as file:
        file.create_group("a")
        file["before"] = np.arange(5.0)
        make(file)
        file["z/after"] = np.arange(50, dtype="i2")
    before = contents(path)
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor("a/w")
        assert (tensor.dtype, tensor.place.storage) == (dtype, storage)
        itemsize = tensor.layout.itemsize
        expected = np.frombuffer(before["a/w"], f"{'<' if order == 'little' else '>'}u{itemsize}").astype(np.uint64)
        flat = np.arange(tensor.elements, dtype=np.int64)
        np.testing.assert_array_equal(checkpoint.read_bits(tensor, flat[::-1]), expected[::-1])
        np.testing.assert_array_equal(np.concatenate(list(checkpoint.blocks(tensor, 8))), expected)
        struck = sorted({0, tensor.elements // 2, tensor.elements - 1})
        xor = [1, 1 << (tensor.layout.width - 1), 3][: len(struck)] if dtype != "bool" else [1, 1, 1]
        strike(checkpoint, "a/w", struck, xor, tmp_path / "b.h5")
    before["a/w"] = xored(before["a/w"], itemsize, order, struck, xor)
    assert contents(tmp_path / "b.h5") == before
    if storage != "filtered":
        assert (tmp_path / "b.h5").stat().st_size == path.stat().st_size


def write(tmp_path: Path, fill: Callable[[Any], object], **options: Any) -> Path:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", **options) as file:
        fill(file)
    return path


UNSUPPORTED: dict[str, tuple[Callable[[Any], object], str]] = {
    "string": (lambda f: f.create_dataset("x", data="text"), "vlen string elements are no numbers"),
    "fixed string": (lambda f: f.create_dataset("x", data=np.bytes_(b"text")), "string elements are no numbers"),
    "vlen": (lambda f: f.create_dataset("x", (2,), h5py.vlen_dtype("f4")), "vlen elements are no numbers"),
    "reference": (lambda f: f.create_dataset("x", (2,), h5py.ref_dtype), "reference elements are no numbers"),
    "compound": (lambda f: f.create_dataset("x", (2,), [("w", "f4"), ("g", "f4")]), "records of w, g"),
    "array": (lambda f: f.create_dataset("x", (2,), "(3,)f4"), r"arrays of shape \(3,\)"),
    "enum": (lambda f: f.create_dataset("x", (2,), h5py.enum_dtype({"A": 1})), "an enumeration"),
    "opaque": (lambda f: f.create_dataset("x", data=np.zeros(2, "V5")), "opaque elements of 5 bytes"),
    "float8 opaque": (lambda f: f.create_dataset("x", data=np.zeros(2, ml_dtypes.float8_e4m3fn)), "opaque .* 1 bytes"),
    "longdouble": (lambda f: f.create_dataset("x", data=np.zeros(2, np.longdouble)), "a custom float"),
    "odd float": (lambda f: raw_dataset(f, "x", custom_float(16, 6, 9, 31), (3,)), "6 exponent and 9 mantissa bits"),
    "empty space": (lambda f: f.create_dataset("x", data=h5py.Empty("f4")), "there is no element"),
    "never written": (lambda f: f.create_dataset("x", (1000,), "f4"), "it was never written"),
    "no chunk written": (lambda f: f.create_dataset("x", (1000,), "f4", chunks=(10,)), "it was never written"),
    "external": (
        lambda f: f.create_dataset("x", (4,), "f4", external=[("raw.bin", 0, 16)]),
        "its bytes lie in other files: raw.bin",
    ),
    "soft link": (lambda f: f.__setitem__("x", h5py.SoftLink("/b/c")), "soft link to /b/c"),
    "external link": (lambda f: f.__setitem__("x", h5py.ExternalLink("o.h5", "/b")), "external link to /b in o.h5"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_cannot_be_struck_is_a_row_with_a_reason(kind: str, tmp_path: Path) -> None:
    """It stays listed, is never part of a population, and the reason says what it is."""
    fill, reason = UNSUPPORTED[kind]
    with open_checkpoint(write(tmp_path, fill)) as checkpoint:
        (tensor,) = checkpoint.tensors
        assert not tensor.supported
        assert tensor.place.storage == "unsupported"
        with pytest.raises(CheckpointError, match=reason):
            checkpoint.read_bits(tensor, np.zeros(1, np.int64))


def test_a_virtual_dataset_names_its_sources(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("part.h5", "deep/w", (4,))
    with open_checkpoint(write(tmp_path, lambda f: f.create_virtual_dataset("x", layout))) as checkpoint:
        assert checkpoint.tensors[0].place.reason == "a virtual dataset over part.h5:deep/w"


def test_an_opaque_dataset_is_what_its_dtype_attribute_states(tmp_path: Path) -> None:
    """Keras writes the attribute; two bytes without one are bfloat16."""

    def fill(file: Any) -> None:
        file["x"] = np.ones(3, ml_dtypes.float8_e4m3fn)
        file["x"].attrs["dtype"] = "float8_e4m3fn"

    with open_checkpoint(write(tmp_path, fill)) as checkpoint:
        (tensor,) = checkpoint.tensors
        assert tensor.dtype == "float8_e4m3fn"
        assert checkpoint.read_bits(tensor, np.arange(3)).tolist() == [0x38] * 3


def test_zero_elements_are_supported_and_hold_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, lambda f: f.create_dataset("x", (0, 3), "f4"), userblock_size=512)
    with open_checkpoint(path) as checkpoint:
        (tensor,) = checkpoint.tensors
        assert (tensor.supported, tensor.elements, tensor.place.offset) == (True, 0, None)
        assert checkpoint.read_bits(tensor, np.zeros(0, np.int64)).tolist() == []
        assert list(checkpoint.blocks(tensor)) == []


def test_hard_links_are_one_tensor_with_all_its_paths_and_loops_end(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file["g/b"] = np.ones(3, "f4")
        file["a"] = file["g/b"]
        file["chunked"] = file.create_dataset("g/c", data=np.ones(3, "f4"), chunks=(2,))
        file["g/loop"] = file["/"]
        file["h"] = file["g"]

    with open_checkpoint(write(tmp_path, fill)) as checkpoint:
        names = {tensor.name: tensor.aliases for tensor in checkpoint.tensors}
        assert names["a"] == ("g/b", "h/b")
        assert names["chunked"] == ("g/c", "h/c")
        assert len(names) == 2
        assert checkpoint.tree()["h"]["b"] in (Leaf("h/b"), Leaf("a"))


def test_groups_linked_twice_at_every_level_are_refused(tmp_path: Path) -> None:
    """They would give 2**depth paths."""

    def fill(file: Any) -> None:
        group = file
        for _ in range(40):
            below = group.create_group("a")
            group["b"] = below
            group = below

    with pytest.raises(CheckpointError, match="more than") as error:
        open_checkpoint(write(tmp_path, fill))
    assert error.value.reason == "header"


def test_the_tree_of_a_plain_file_is_its_groups(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        file["g/h/x"] = np.ones(3, "f4")
        file.create_group("g/empty")

    with open_checkpoint(write(tmp_path, fill)) as checkpoint:
        assert checkpoint.tree() == {"g": {"empty": {}, "h": {"x": Leaf("g/h/x")}}}


def test_a_compact_dataset_is_rewritten_inside_its_header(tmp_path: Path) -> None:
    """In files of the newest version too, whose headers have a checksum."""
    for version in ("earliest", "latest"):

        def fill(file: Any) -> None:
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.COMPACT)
            for name, shape in ((b"x", (3, 5)), (b"s", ())):
                space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
                made = h5py.h5d.create(file.id, name, h5py.h5t.IEEE_F32BE, space, properties)
                h5py.Dataset(made)[...] = 2.0

        path = write(tmp_path, fill, libver=version)
        before = contents(path)
        with open_checkpoint(path) as checkpoint:
            assert {tensor.place.storage for tensor in checkpoint.tensors} == {"compact"}
            assert checkpoint.read_bits(checkpoint.tensor("s"), np.zeros(1, np.int64)).tolist() == [0x40000000]
            strike(checkpoint, "x", [7], [1 << 31], tmp_path / "b.h5")
        before["x"] = xored(before["x"], 4, "big", [7], [1 << 31])
        assert contents(tmp_path / "b.h5") == before
        old, new = path.read_bytes(), (tmp_path / "b.h5").read_bytes()
        changed = [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        element = old.find(np.full(15, 2, ">f4").tobytes()) + 4 * 7
        assert changed[0] == element  # and no time of day, which HDF5 would write beside it
        assert len(changed) == 1 or (version == "latest" and len(changed) <= 5)


def test_a_struck_compact_dataset_of_zeros_is_patched_at_its_place(tmp_path: Path) -> None:
    """Messages of old headers are padded with zeros, which look like elements."""

    def fill(file: Any) -> None:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((1,)), properties)
        h5py.Dataset(h5py.h5d.open(file.id, b"x"))[...] = 0

    path = write(tmp_path, fill, libver="earliest")
    with open_checkpoint(path) as checkpoint:
        strike(checkpoint, "x", [0], [1 << 31], tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5") as file:
        assert np.signbit(file["x"][0])


def test_the_checksum_of_headers_is_that_of_its_source() -> None:
    """The values that lookup3.c gives for itself."""
    assert [checksum(b""), checksum(b"Four score and seven years ago")] == [0xDEADBEEF, 0x17770551]


@pytest.mark.parametrize("filters", [{}, {"compression": "gzip"}, {"scaleoffset": 2}], ids=["none", "gzip", "lossy"])
def test_a_chunk_never_written_holds_the_fill_value_and_a_fault_adds_it(
    filters: dict[str, Any], tmp_path: Path
) -> None:
    def fill(file: Any) -> None:
        dataset = file.create_dataset("x", (20, 20), "f4", chunks=(8, 8), fillvalue=3, **filters)
        dataset[:8, :8] = 1.5

    path = write(tmp_path, fill)
    before = contents(path)
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor("x")
        assert tensor.place.storage == ("filtered" if filters else "sparse")
        (note,) = checkpoint.notes
        assert note.startswith("x: 8 of 9 chunks were never written and hold the fill value")
        bits = checkpoint.read_bits(tensor, np.array([0, 399], np.int64))
        assert bits.tolist() == [struct.unpack("<I", struct.pack("<f", value))[0] for value in (1.5, 3.0)]
        strike(checkpoint, "x", [0, 399], [1, 1 << 30], tmp_path / "b.h5")
    before["x"] = xored(before["x"], 4, "little", [0, 399], [1, 1 << 30])
    assert contents(tmp_path / "b.h5") == before


class Shifted:
    """A dataset whose chunks HDF5 places `wrong` bytes too early, as before 1.14.4 (HDFGroup/hdf5#3003)."""

    def __init__(self, dataset: Any, wrong: int) -> None:
        self.dataset, self.wrong = dataset, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def chunk_iter(self, call: Callable[[Any], None]) -> None:
        self.dataset.chunk_iter(lambda info: call(info._replace(byte_offset=info.byte_offset - self.wrong)))


@pytest.fixture
def said_right() -> None:
    """Skips where HDF5 itself gives wrong addresses, so that none need be made up."""
    if h5py.version.hdf5_version_tuple < (1, 14, 4):
        pytest.skip("this HDF5 leaves the userblock out")


@pytest.mark.usefixtures("said_right")
def test_chunk_addresses_that_leave_the_userblock_out_are_noticed(tmp_path: Path) -> None:
    data = np.random.default_rng(1).normal(size=(8, 8))
    path = write(tmp_path, lambda f: f.create_dataset("x", data=data, chunks=(3, 3)), userblock_size=512)
    with Hdf5File(path) as checkpoint, h5py.File(path) as file:
        source = checkpoint.sources[""]
        right = hdf5_chunks.chunk_starts(file["x"].id, source, 512)
        np.testing.assert_array_equal(hdf5_chunks.chunk_starts(Shifted(file["x"].id, 512), source, 512), right)
        with pytest.raises(CheckpointError, match="addresses"):
            hdf5_chunks.chunk_starts(Shifted(file["x"].id, 100), source, 512)


@pytest.mark.usefixtures("said_right")
def test_an_old_hdf5_s_addresses_are_right_where_equal_bytes_lie_at_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of zeros after zeros: what is there doesn't tell, the library's version does."""
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", (1, 12, 2))

    def fill(file: Any) -> None:
        file["before"] = np.zeros(1000)
        file.create_dataset("x", data=np.zeros((64, 64)), chunks=(16, 16))
        file["x"][40, 40] = 7

    path = write(tmp_path, fill, userblock_size=512)
    with Hdf5File(path) as checkpoint, h5py.File(path) as file:
        dataset = Shifted(file["x"].id, 512)
        starts = hdf5_chunks.chunk_starts(dataset, checkpoint.sources[""], 512)
    (seven,) = np.frombuffer(path.read_bytes()[starts[10] :][: 8 * (8 * 16 + 9)], "<f8")[-1:]
    assert seven == 7


def test_chunks_are_found_without_chunk_iter(tmp_path: Path) -> None:
    """h5py has it only with HDF5 1.12.3 and later."""
    data = np.random.default_rng(1).normal(size=(8, 8))
    path = write(tmp_path, lambda f: f.create_dataset("x", data=data, chunks=(3, 3)))

    class Old:
        """What an old h5py offers."""

        def __init__(self, dataset: Any) -> None:
            self.get_chunk_info = dataset.get_chunk_info
            self.get_num_chunks = dataset.get_num_chunks
            self.rank = dataset.rank

    with h5py.File(path) as file:
        new = hdf5_chunks.stored_chunks(file["x"].id)
        assert sorted(hdf5_chunks.stored_chunks(Old(file["x"].id)).tolist()) == sorted(new.tolist())
        assert new.shape == (9, 5)


def test_names_that_are_no_utf8_stay_readable(tmp_path: Path) -> None:
    def fill(file: Any) -> None:
        space = h5py.h5s.create_simple((2,))
        h5py.h5d.create(file.id, b"w\xff", h5py.h5t.IEEE_F32LE, space).write(space, space, np.ones(2, "f4"))

    with open_checkpoint(write(tmp_path, fill)) as checkpoint:
        assert [tensor.name for tensor in checkpoint.tensors] == ["w\\xff"]


def test_a_file_open_for_writing_elsewhere_is_locked(tmp_path: Path) -> None:
    """By its lock, and by the mark that stays in the file when the writer has crashed."""
    path = write(tmp_path, lambda f: f.create_dataset("x", data=np.ones(3)), libver="latest")
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="holds a lock") as error:
        open_checkpoint(path)
    assert error.value.reason == "locked"
    os.close(descriptor)
    crash = "import h5py, os, sys; f = h5py.File(sys.argv[1], 'r+', libver='latest'); f.swmr_mode = True; os._exit(0)"
    subprocess.run([sys.executable, "-c", crash, str(path)], check=True)
    with pytest.raises(CheckpointError, match="h5clear") as error:
        open_checkpoint(path)
    assert error.value.reason == "locked"


def test_a_missing_filter_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, lambda f: f.create_dataset("x", data=np.ones(64), chunks=(8,), compression="lzf"))
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    with open_checkpoint(path) as checkpoint:
        assert "filter 32000 (lzf) is not installed" in str(checkpoint.tensors[0].place.reason)


def test_a_claim_far_beyond_the_file_is_refused(tmp_path: Path) -> None:
    """A few bytes of chunks can claim any amount of memory."""

    def fill(file: Any) -> None:
        file.create_dataset("many", (1 << 40,), "f4", chunks=(16,))[:16] = 1
        file.create_dataset("tiny", (1 << 22,), "u1", chunks=(2,))[:16] = 1
        file.create_dataset("huge", (1 << 30,), "f4", chunks=(1 << 29,), compression="gzip", fillvalue=0)

    path = write(tmp_path, fill)
    with open_checkpoint(path) as checkpoint:
        assert "claims" in str(checkpoint.tensor("many").place.reason)
        assert "2097144 of 2097152 chunks were never written" in str(checkpoint.tensor("tiny").place.reason)
        assert not checkpoint.tensor("huge").supported


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with one dataset of each storage."""
    path = tmp_path_factory.mktemp("small") / "a.h5"
    with h5py.File(path, "w") as file:
        file["g/plain"] = np.ones((2, 3), "f4")
        file.create_dataset("g/chunks", data=np.ones((4, 4), "f4"), chunks=(3, 3))
        file.create_dataset("packed", data=np.ones((4, 4), "f4"), chunks=(3, 3), compression="gzip", fletcher32=True)
        file["soft"] = h5py.SoftLink("/g")
        file["text"] = "text"
    return path.read_bytes()


def outcome(path: Path) -> str:
    """Open, read and check a file; the reason if flipper refuses it."""
    try:
        with Hdf5File(path) as checkpoint:
            for tensor in checkpoint.tensors:
                if tensor.supported:
                    checkpoint.read_bits(tensor, np.arange(min(tensor.elements, 64), dtype=np.int64))
            list(checkpoint.problems())
            checkpoint.tree()
    except FlipperError as error:
        return getattr(error, "reason", "other") if "\n" not in str(error) else "several lines"
    return "fine"


def test_a_file_cut_anywhere_is_refused_as_truncated(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.h5"
    reasons = set()
    for length in [*range(0, len(small), 7), len(small) - 1]:
        path.write_bytes(small[:length])
        reasons.add((length < 8, outcome(path)))
    assert reasons == {(True, "foreign"), (False, "truncated")}


MUTATE = """
import sys, numpy as np
from pathlib import Path
sys.path[:0] = sys.argv[3].split(":")
from test_hdf5 import outcome
original, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
random = np.random.default_rng(int(sys.argv[4]))
counts = {}
for _ in range(int(sys.argv[5])):
    data = bytearray(original)
    for position in random.integers(0, len(data), int(random.integers(1, 6))).tolist():
        flipped = data[position] ^ 1 << int(random.integers(8))
        data[position] = int(random.choice([0, 255, flipped, int(random.integers(256))]))
    path.write_bytes(data)
    reason = outcome(path)
    counts[reason] = counts.get(reason, 0) + 1
print(counts)
"""


def test_random_changes_give_nothing_but_named_reasons(small: bytes, tmp_path: Path) -> None:
    """In a process of its own, since no Python code can catch a crash inside the HDF5 library."""
    (tmp_path / "original.h5").write_bytes(small)
    places = f"{Path(__file__).parent}:{Path(__file__).parents[2]}"
    command = [sys.executable, "-c", MUTATE, str(tmp_path / "original.h5"), str(tmp_path / "m.h5"), places, "1", "1500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'fine'" in done.stdout
    assert "several lines" not in done.stdout


def test_a_wrong_fletcher32_is_a_problem_and_a_checksum_error(tmp_path: Path) -> None:
    path = write(tmp_path, lambda f: f.create_dataset("x", data=np.ones((4, 4)), chunks=(2, 4), fletcher32=True))
    with h5py.File(path) as file:
        start = file["x"].id.get_chunk_info(1).byte_offset
    data = bytearray(path.read_bytes())
    data[start + 3] ^= 4
    path.write_bytes(data)
    with open_checkpoint(path) as checkpoint:
        (problem,) = checkpoint.problems()
        assert "x: the chunk at (2, 0)" in problem
        with pytest.raises(CheckpointError) as error:
            checkpoint.read_bits(checkpoint.tensor("x"), np.array([12], np.int64))
    assert error.value.reason == "checksum"


def tensors_of(path: Path) -> Iterator[Any]:
    with open_checkpoint(path) as checkpoint:
        yield from checkpoint.tensors


def test_a_contiguous_dataset_lies_where_h5py_says(tmp_path: Path) -> None:
    path = write(tmp_path, lambda f: f.create_dataset("x", data=np.arange(3, dtype="<f4")), userblock_size=2048)
    (tensor,) = tensors_of(path)
    assert isinstance(tensor.place, Extent)
    data = path.read_bytes()
    assert data[tensor.place.start :][:12] == np.arange(3, dtype="<f4").tobytes()
