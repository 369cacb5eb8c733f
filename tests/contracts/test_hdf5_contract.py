"""HDF5 files keep the contract: every layout and filter that h5py writes, and Keras' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from battery import FormatContract
from oracles import Array, read_hdf5, read_keras

SAMPLES = Path(__file__).parent.parent.parent / "sample_checkpoints"


def values(dtype: str, *shape: int) -> Any:
    """Random numbers; of a few values only, so that filters have something to compress."""
    generator = np.random.default_rng(len(dtype) + sum(shape))
    if dtype == "?":
        return generator.integers(0, 2, shape).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return generator.integers(0, 100, shape).astype(dtype)
    found = generator.integers(-20, 20, shape) / 8
    return found.astype(dtype) if np.dtype(dtype).kind == "f" else (found + 1j * found[::-1]).astype(dtype)


class TestHdf5Contiguous(FormatContract):
    format = "hdf5"
    options: dict[str, Any] = {}
    file_options: dict[str, Any] = {}
    dtypes = ("<f4", "<f8", "<f2", "<c8", "<c16", "<i4", "<u2", "i1", "?")

    def make(self, folder: Path) -> Path:
        with h5py.File(folder / "model.h5", "w", **self.file_options) as file:
            for dtype in self.dtypes:
                file.create_dataset(f"layer/{np.dtype(dtype).name}", data=values(dtype, 13, 11), **self.options)
            self.more(file)
        return folder / "model.h5"

    def more(self, file: Any) -> None:
        file["scalar"] = np.float32(2.5)
        file.create_dataset("empty", (0, 3), "<f4")
        file["notes"] = "words are no numbers"

    def read(self, path: Path) -> dict[str, Array]:
        return read_hdf5(path)

    def test_names_dtypes_shapes_and_values_are_those_of_its_own_reader(
        self, source: Path, arrays: dict[str, Array]
    ) -> None:
        strings = {"notes"} & set(arrays)
        assert not strings
        from flipper.checkpoints import open_checkpoint

        with open_checkpoint(source) as checkpoint:
            for name, array in arrays.items():
                tensor = checkpoint.tensor(name)
                assert (tensor.dtype, tensor.shape) == (array.dtype, array.shape), name
                streamed = np.concatenate([*checkpoint.blocks(tensor, 64), np.zeros(0, np.uint64)])
                assert np.array_equal(streamed, array.bits), name
            supported = {name for tensor in checkpoint.tensors if tensor.supported for name in tensor.names}
            assert set(arrays) <= supported


class TestHdf5BigEndian(TestHdf5Contiguous):
    order = "big"
    dtypes = (">f4", ">f8", ">f2", ">c8", ">i4", ">u2")

    def more(self, file: Any) -> None:
        file["scalar"] = np.array(2.5, ">f4")


class TestHdf5Chunked(TestHdf5Contiguous):
    """Chunks without filters, the last ones of each axis reaching past the array."""

    options = {"chunks": (5, 6)}


class TestHdf5LatestChunked(TestHdf5Chunked):
    file_options = {"libver": "latest"}


class TestHdf5Userblock(TestHdf5Contiguous):
    file_options = {"userblock_size": 1024}


class TestHdf5Gzip(TestHdf5Contiguous):
    options = {"chunks": (5, 6), "compression": "gzip"}
    exact = False
    plain = False


class TestHdf5Shuffle(TestHdf5Gzip):
    options = {"chunks": (5, 6), "compression": "gzip", "shuffle": True}


class TestHdf5Lzf(TestHdf5Gzip):
    options = {"chunks": (5, 6), "compression": "lzf"}


class TestHdf5Fletcher32(TestHdf5Gzip):
    options = {"chunks": (5, 6), "fletcher32": True}
    checksums = True


class TestHdf5GzipFletcher32(TestHdf5Fletcher32):
    """The checksum is that of the compressed bytes."""

    options = {"chunks": (5, 6), "compression": "gzip", "shuffle": True, "fletcher32": True}


class TestHdf5LatestGzip(TestHdf5Gzip):
    file_options = {"libver": "latest"}


class TestHdf5UserblockGzip(TestHdf5Gzip):
    file_options = {"userblock_size": 2048}


class TestHdf5BigEndianGzip(TestHdf5Gzip):
    order = "big"
    dtypes = (">f4", ">f8", ">c8", ">i4")


class TestHdf5OneFilteredChunk(TestHdf5Gzip):
    """Whole datasets in one chunk each, so that a struck chunk is most of the file and the last thing in it."""

    options = {"chunks": (13, 11), "compression": "gzip"}
    dtypes = ("<f4", "<f8")


class TestHdf5Compact(TestHdf5Gzip):
    """Elements in the object headers."""

    def make(self, folder: Path) -> Path:
        with h5py.File(folder / "model.h5", "w") as file:
            for dtype in ("<f4", "<f8", "<i2"):
                data = values(dtype, 6, 7)
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_layout(h5py.h5d.COMPACT)
                space = h5py.h5s.create_simple(data.shape)
                name = np.dtype(dtype).name.encode()
                made = h5py.h5d.create(file.id, name, h5py.h5t.py_create(data.dtype), space, plist)
                made.write(h5py.h5s.ALL, h5py.h5s.ALL, data)
            file["plain"] = values("<f4", 9, 9)
        return folder / "model.h5"


class TestHdf5Bfloat16(TestHdf5Contiguous):
    """A floating-point type of 8 exponent and 7 mantissa bits, which HDF5 can describe."""

    def make(self, folder: Path) -> Path:
        kind = h5py.h5t.IEEE_F16LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_ebias(127)
        with h5py.File(folder / "model.h5", "w") as file:
            made = h5py.h5d.create(file.id, b"w", kind, h5py.h5s.create_simple((12, 9)))
            raw = np.random.default_rng(0).integers(0, 2**16, (12, 9)).astype("<u2")
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, kind)
        return folder / "model.h5"


class TestSampleHdf5(TestHdf5Contiguous):
    """As flipper itself writes it, names joined by dots."""

    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-mlp.h5"

    def read(self, path: Path) -> dict[str, Array]:
        return {name.replace("/", "."): array for name, array in read_hdf5(path).items()}


class TestSampleChainer(TestHdf5Gzip):
    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-chainer.h5"


class TestSampleKerasWeights(TestHdf5Contiguous):
    """Keras names its layers by type and number; the model's own names are aliases that h5py doesn't know."""

    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-keras.weights.h5"


class TestSampleKeras(TestHdf5Contiguous):
    """A zip archive with an HDF5 file in it."""

    format = "keras"
    checksums = True

    def make(self, folder: Path) -> Path:
        return SAMPLES / "digits-keras.keras"

    def read(self, path: Path) -> dict[str, Array]:
        return read_keras(path)
