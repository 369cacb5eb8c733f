"""PyTorch's files keep the contract: zip archives of all makes, legacy streams, TorchScript."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import FormatContract, plan_for
from oracles import Array, changes, numbers, read_torch, read_torchscript, torch_array, zip_checksum_bytes

from flipper.injection.inject import inject

SAMPLES = Path(__file__).parent.parent.parent / "sample_checkpoints"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def state() -> dict[str, Any]:
    """Every dtype of torch.save, views that don't overlap, ties, nesting."""
    torch.manual_seed(0)
    tied, block = torch.randn(6, 5), torch.randn(8, 6)
    return {
        "model": {
            "fc.weight": torch.randn(10, 7),
            "fc.bias": torch.randn(10).bfloat16(),
            "in.weight": tied,
            "out.weight": tied,
            "query": block[:4],
            "key": block[4:].t(),
            "stepped": torch.randn(20)[::3],
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(10, 7).half()}}},
        "list": [torch.randn(3).double(), torch.randn(4).to(torch.float8_e4m3fn), torch.randn(4).to(torch.float8_e5m2)],
        "spectrum": torch.randn(5, dtype=torch.complex128),
        "small": torch.randn(4, dtype=torch.complex64),
        "ints": torch.arange(-4, 4),
        "short": torch.arange(-4, 4, dtype=torch.int16),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "epoch": 3,
    }


def entries(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class TestPyTorchZip(FormatContract):
    """As torch.save writes it: stored, data descriptors, CRCs."""

    format = "pytorch"
    checksums = True

    def make(self, folder: Path) -> Path:
        (folder / "model.pt").write_bytes(saved(state()))
        return folder / "model.pt"

    def read(self, path: Path) -> dict[str, Array]:
        with zipfile.ZipFile(path) as archive:
            if "keep" not in path.name:
                self.check(archive)
        return read_torch(path)

    def check(self, archive: zipfile.ZipFile) -> None:
        assert archive.testzip() is None


class TestPyTorchZipStoredAgain(TestPyTorchZip):
    """Zipped anew by Python: CRCs in local headers, nothing aligned."""

    def make(self, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "model.pt", "w") as archive:
            for name, content in entries(saved(state())):
                archive.writestr(name, content)
        return folder / "model.pt"


class TestPyTorchZipWithoutCrcs(TestPyTorchZip):
    """Zeros in place of CRCs, which torch can be told to write: they stay zeros."""

    checksums = False

    def make(self, folder: Path) -> Path:
        torch.serialization.set_crc32_options(False)
        try:
            return super().make(folder)
        finally:
            torch.serialization.set_crc32_options(True)

    def check(self, archive: zipfile.ZipFile) -> None:
        assert {entry.CRC for entry in archive.infolist() if entry.file_size} == {0}


class TestPyTorchZipDeflated(TestPyTorchZip):
    """Compressed by hand: an altered copy is written anew, and there is nothing to patch in place."""

    in_place = False
    exact = False
    plain = False

    def make(self, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in entries(saved(state())):
                archive.writestr(name, content)
        return folder / "model.pt"


class TestPyTorchZipOfABigEndianMachine(TestPyTorchZip):
    """byteorder says big."""

    order = "big"

    def make(self, folder: Path) -> Path:
        torch.manual_seed(1)
        tensors = {
            "a": torch.randn(9, 5),
            "b": torch.randn(6).double(),
            "c": torch.randn(8).half(),
            "d": torch.arange(5),
        }
        sizes = [tensor.element_size() for tensor in tensors.values()]
        with zipfile.ZipFile(folder / "big.pt", "w") as archive:
            for name, content in entries(saved(tensors)):
                if name.endswith("/byteorder"):
                    content = b"big"
                elif "/data/" in name:
                    content = swapped(content, sizes[int(name.rsplit("/", 1)[1])])
                archive.writestr(name, content)
        return folder / "big.pt"


def swapped(content: bytes, size: int) -> bytes:
    return b"".join(content[at : at + size][::-1] for at in range(0, len(content), size))


class TestPyTorchLegacy(FormatContract):
    """The stream of torch before 1.6."""

    format = "pytorch-legacy"

    def make(self, folder: Path) -> Path:
        plain = {**state(), "list": [torch.randn(3).double()]}  # torch can't load its float8 from such a stream
        torch.save(plain, folder / "old.pt", _use_new_zipfile_serialization=False)
        return folder / "old.pt"

    def read(self, path: Path) -> dict[str, Array]:
        return read_torch(path)


class TestTorchScript(FormatContract):
    format = "torchscript"
    checksums = True

    def make(self, folder: Path) -> Path:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)).eval()
        torch.jit.trace(model, torch.zeros(2, 6)).save(str(folder / "script.pt"))
        return folder / "script.pt"

    def read(self, path: Path) -> dict[str, Array]:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        return read_torchscript(path)


class TestSampleTorchScript(TestTorchScript):
    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-cnn-script.pt"


class TestSamplePyTorch(TestPyTorchZip):
    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-mlp.pt"


class TestSampleLegacy(TestPyTorchLegacy):
    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-cnn-legacy.pt"


def test_views_that_overlap_are_struck_once_a_byte(tmp_path: Path) -> None:
    """Every row is what torch sees; no bit was turned twice; aliases see what their tensor sees."""
    source, out = SAMPLES / "ties-and-views.pt", tmp_path / "out.pt"
    before = read_torch(source)
    made = inject(source, out, plan_for(source, before, count=500))
    after = read_torch(out)
    for row in made.faults:
        for name in (row["tensor"], *row["aliases"]):
            assert int(before[name].bits[row["flat"]]) == int(row["before"], 16)
            assert int(after[name].bits[row["flat"]]) == int(row["after"], 16)
    told = {(name, row["flat"]) for row in made.faults for name in (row["tensor"], *row["aliases"])}
    seen = {place for place in changes(before, after) if "window" not in place[0]}
    assert seen == {place for place in told if "window" not in place[0]}
    old, new = source.read_bytes(), out.read_bytes()
    crcs = zip_checksum_bytes(old)
    assert sum(bin(a ^ b).count("1") for at, (a, b) in enumerate(zip(old, new, strict=True)) if at not in crcs) == 500


def test_the_oracle_reads_what_struct_reads() -> None:
    """A float32 and a packed byte, by hand."""
    assert torch_array(torch.tensor([1.0, -2.0])).bits.tolist() == [0x3F800000, 0xC0000000]
    assert numbers(b"\x21\x43", 4).tolist() == [1, 2, 3, 4]
