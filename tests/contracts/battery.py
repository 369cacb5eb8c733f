"""The contract of every container format, as tests: a format says how to make a file and how others read it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from oracles import Array, changes, field_of, files_of, index_of, width_of, zip_checksum_bytes

from flipper.checkpoints import open_checkpoint
from flipper.errors import CheckpointError
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.faults.plan import FaultPlan
from flipper.injection.diff import Difference, differences, rows
from flipper.injection.inject import inject
from flipper.injection.manifest import Manifest, read_manifest
from flipper.injection.recording import Record
from flipper.injection.replay import replay_plan
from flipper.injection.undo import undo
from flipper.injection.verify import verify

COUNT = 40


def plan_for(path: Path, arrays: dict[str, Array], seed: int = 1, **options: object) -> FaultPlan:
    """Faults over all dtypes of the file, integers too."""
    options.setdefault("count", COUNT)
    dtypes = sorted({array.dtype for array in arrays.values() if array.bits.size})
    with open_checkpoint(path) as checkpoint:
        return draw(checkpoint, FaultModel(dtypes=dtypes, **options), seed)


def expected(before: dict[str, Array], plan: FaultPlan, aliases: dict[str, tuple[str, ...]]) -> dict[str, np.ndarray]:
    """The bits of every array after the plan, struck one fault at a time."""
    after = {name: array.bits.copy() for name, array in before.items()}
    for fault in plan:
        for name in {fault.tensor, *aliases.get(fault.tensor, ())} & after.keys():
            old = int(after[name][fault.flat])
            new = old ^ fault.mask if fault.op == "flip" else old & ~fault.mask | fault.value & fault.mask
            after[name][fault.flat] = new
    return after


def aliases_of(path: Path) -> dict[str, tuple[str, ...]]:
    with open_checkpoint(path) as checkpoint:
        return {tensor.name: tensor.aliases for tensor in checkpoint.tensors}


class FormatContract:
    """Tests that every format inherits.

    format: as flipper calls it. checksums: whether the container holds some that `verify` checks.
    in_place: whether bytes can be patched where they lie. exact: whether nothing but elements and zip CRCs may change
    in a copy. order: of the bytes of an element on disk. plain: whether every element has an offset.
    """

    format = ""
    checksums = False
    in_place = True
    exact = True
    order = "little"
    plain = True

    def make(self, folder: Path) -> Path:
        """Write a small file (or directory) by the format's own library."""
        raise NotImplementedError

    def read(self, path: Path) -> dict[str, Array]:
        """All its tensors, read by the format's own library."""
        raise NotImplementedError

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        folder = tmp_path / "made"
        folder.mkdir()
        made = self.make(folder)
        target = tmp_path / made.name
        if made.parent == folder:
            made.rename(target)
        else:  # a sample
            shutil.copytree(made, target) if made.is_dir() else shutil.copy(made, target)
        return target

    @pytest.fixture
    def arrays(self, source: Path) -> dict[str, Array]:
        return self.read(source)

    @pytest.fixture
    def plan(self, source: Path, arrays: dict[str, Array]) -> FaultPlan:
        return plan_for(source, arrays)

    def altered(self, source: Path, plan: FaultPlan, name: str = "altered", **note: object) -> tuple[Path, Manifest]:
        out = source.parent / name
        return out, inject(source, out, plan, record=Record(**note))

    def test_it_is_told_by_its_content(self, source: Path) -> None:
        for name in ("model.h5", "model.safetensors", "model.pt", "model", "model.json"):
            other = source.rename(source.parent / name)
            with open_checkpoint(other) as checkpoint:
                assert checkpoint.format == self.format
            source = other

    def test_names_dtypes_shapes_and_values_are_those_of_its_own_reader(
        self, source: Path, arrays: dict[str, Array]
    ) -> None:
        with open_checkpoint(source) as checkpoint:
            assert all(any(name in arrays for name in tensor.names) for tensor in checkpoint.tensors)
            for name, array in arrays.items():
                tensor = checkpoint.tensor(name)
                assert (tensor.dtype, tensor.shape) == (array.dtype, array.shape), name
                streamed = np.concatenate([*checkpoint.blocks(tensor, 64), np.zeros(0, np.uint64)])
                assert np.array_equal(streamed, array.bits), name
                some = np.arange(tensor.elements)[::-3].copy()
                assert np.array_equal(checkpoint.read_bits(tensor, some), array.bits[some]), name

    def test_exactly_the_recorded_bits_are_flipped(
        self, source: Path, arrays: dict[str, Array], plan: FaultPlan
    ) -> None:
        out, manifest = self.altered(source, plan)
        seen = changes(arrays, self.read(out))
        told = {
            (name, row["flat"]): (int(row["before"], 16), int(row["after"], 16))
            for row in manifest.faults for name in {row["tensor"], *row["aliases"]} & arrays.keys()
        }  # fmt: skip
        assert seen == told
        assert sum(bin(old ^ new).count("1") for old, new in
                   ((int(row["before"], 16), int(row["after"], 16)) for row in manifest.faults)) == COUNT  # fmt: skip

    @pytest.mark.parametrize("effect", ["set1", "random", "scale:-3", "flip:0x3"])
    def test_every_effect_does_to_the_file_what_it_says(
        self, source: Path, arrays: dict[str, Array], effect: str
    ) -> None:
        if effect.startswith("scale"):
            arrays = {name: array for name, array in arrays.items() if "float" in array.dtype}
        if not arrays:
            pytest.skip("no floating-point tensors")
        plan = plan_for(source, arrays, effect=effect, count=12)
        out, manifest = self.altered(source, plan)
        after = self.read(out)
        for name, bits in expected(arrays, plan, aliases_of(source)).items():
            assert np.array_equal(after[name].bits, bits), name
        assert manifest.table.unchanged == sum(row["before"] == row["after"] for row in manifest.faults)

    def test_a_dense_dose_is_right_too(self, source: Path, arrays: dict[str, Array]) -> None:
        """One bit in fifty: several faults an element and a byte, copied and patched in one pass."""
        plan = plan_for(source, arrays, count=None, ber="0.02")
        out, _ = self.altered(source, plan)
        after = self.read(out)
        for name, bits in expected(arrays, plan, aliases_of(source)).items():
            assert np.array_equal(after[name].bits, bits), name

    def test_every_other_byte_is_as_it_was(self, source: Path, plan: FaultPlan) -> None:
        if not self.exact:
            pytest.skip("what holds the elements is rewritten")
        out, manifest = self.altered(source, plan)
        old, new = files_of(source), files_of(out)
        assert old.keys() == new.keys()
        for file, data in old.items():
            assert len(new[file]) == len(data)
            allowed = zip_checksum_bytes(data)
            for row in manifest.faults:
                if not file or row["file"] == file:
                    allowed.update(range(row["offset"], row["offset"] + max(1, width_of(row["dtype"]) // 8) + 1))
            differing = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(new[file], np.uint8))
            assert set(differing.tolist()) <= allowed

    def test_rows_tell_index_bits_fields_values_and_offset(
        self, source: Path, arrays: dict[str, Array], plan: FaultPlan
    ) -> None:
        out, manifest = self.altered(source, plan)
        files = files_of(source)
        written = json.loads(manifest.path.read_text())
        assert written["schema"] == "flipper-manifest/1"
        assert [(row["tensor"], row["flat"]) for row in written["faults"]] == sorted(
            (row["tensor"], row["flat"]) for row in written["faults"]
        )
        for row in written["faults"]:
            array = arrays[next(name for name in (row["tensor"], *row["aliases"]) if name in arrays)]
            mask, before, after = (int(row[key], 16) for key in ("mask", "before", "after"))
            width = width_of(array.dtype)
            assert (row["dtype"], row["op"], row["value"]) == (array.dtype, "flip", None)
            assert len(row["mask"]) == len(row["before"]) == len(row["after"]) == 2 + (width + 3) // 4
            assert before == int(array.bits[row["flat"]])
            assert after == before ^ mask
            dims = array.shape + ((2,) if array.dtype.startswith("complex") else ())
            assert row["index"] == index_of(row["flat"], dims)
            assert row["bits"] == [bit for bit in range(64) if mask >> bit & 1]
            assert set(row["fields"]) == {field_of(array.dtype, bit) for bit in row["bits"]}
            assert row["file"] == (out.name if source.is_file() else row["file"])
            self.check_offset(row, files["" if source.is_file() else row["file"]], width)

    def check_offset(self, row: dict, data: bytes, width: int) -> None:
        """The bytes at the row's offset are the element before the injection."""
        if row["offset"] is None:
            assert not self.plain
            return
        raw = data[row["offset"] : row["offset"] + max(width // 8, 2)]
        order = "little" if width <= 8 else self.order
        number = int.from_bytes(raw[: max(width // 8, 1)] if width >= 8 else raw, order)
        shift = 0 if width >= 8 else row["flat"] * width % 8
        assert number >> shift & ((1 << width) - 1) == int(row["before"], 16)

    def test_the_same_plan_twice_is_nothing(self, source: Path, arrays: dict[str, Array], plan: FaultPlan) -> None:
        once, _ = self.altered(source, plan)
        twice, _ = self.altered(once, plan, "twice")
        assert changes(arrays, self.read(twice)) == {}
        if self.exact:
            assert files_of(twice) == files_of(source)

    def test_undo_gives_a_copy_the_bytes_of_its_source(self, source: Path, plan: FaultPlan) -> None:
        out, manifest = self.altered(source, plan)
        undo(out)
        assert files_of(out) == files_of(source)
        assert not manifest.path.exists()

    def test_in_place_gives_the_same_bytes_as_a_copy(self, source: Path, plan: FaultPlan) -> None:
        former = files_of(source)
        out, _ = self.altered(source, plan)
        if not self.in_place:
            with pytest.raises(CheckpointError) as error:
                inject(source, None, plan)
            assert error.value.reason == "unsupported-storage"
            assert files_of(source) == former
            assert sorted(p.name for p in source.parent.iterdir() if "flipper" in p.name) == ["altered.flipper.json"]
            return
        inject(source, None, plan)
        assert files_of(source) == files_of(out)
        undo(source)
        assert files_of(source) == former

    def test_injections_in_place_stack_and_are_undone_newest_first(
        self, source: Path, arrays: dict[str, Array]
    ) -> None:
        if not self.in_place:
            pytest.skip("bytes have no place to patch")
        states = [files_of(source)]
        for seed in range(3):
            manifest = inject(source, None, plan_for(source, arrays, seed))
            suffix = "" if seed == 0 else f".{seed + 1}"
            assert manifest.path == source.with_name(f"{source.name}.flipper{suffix}.json")
            states.append(files_of(source))
        for state in states[-2::-1]:
            undo(source)
            assert files_of(source) == state
        assert not [path for path in source.parent.iterdir() if "flipper" in path.name]

    def test_replaying_the_manifest_gives_the_same_file(self, source: Path, plan: FaultPlan) -> None:
        out, manifest = self.altered(source, plan)
        again, repeated = self.altered(source, replay_plan(manifest.path), "again")
        assert files_of(again) == files_of(out)
        assert len(repeated.faults) == len(manifest.faults)
        for new, old in zip(repeated.faults, manifest.faults, strict=True):
            assert str({**new, "file": ""}) == str({**old, "file": ""})  # as text, in which NaN equals NaN

    def test_diff_finds_the_rows_of_the_manifest(self, source: Path, plan: FaultPlan) -> None:
        out, manifest = self.altered(source, plan)
        with open_checkpoint(source) as one, open_checkpoint(out) as other:
            found = list(differences(one, other))
        assert all(isinstance(each, Difference) for each in found)
        columns = ("tensor", "flat", "index", "dtype", "before", "after", "bits", "fields")
        seen = [[row[key] for key in columns] for each in found for row in rows(each)]
        assert seen == [[row[key] for key in columns] for row in manifest.faults]

    def test_verify_is_complete_with_the_source_and_only_then(self, source: Path, plan: FaultPlan) -> None:
        out, manifest = self.altered(source, plan)
        verdict = verify(out, manifest.path, source)
        assert (verdict.problems, verdict.complete, verdict.faults) == ((), True, len(manifest.faults))
        verdict = verify(out, manifest.path)
        assert (verdict.problems, verdict.complete) == ((), False)
        assert verify(source).problems == verify(out).problems == ()
        assert verify(source, manifest.path).problems

    def test_a_recorded_digest_serves_in_place_of_the_source(self, source: Path, plan: FaultPlan) -> None:
        out, manifest = self.altered(source, plan, digests=True)
        verdict = verify(out, manifest.path)
        assert (verdict.problems, verdict.complete) == ((), True)

    def test_checksums_are_left_stale_when_asked_for(self, source: Path, plan: FaultPlan) -> None:
        out, manifest = self.altered(source, plan, keep_checksums=True)
        assert bool(verify(out).problems) == self.checksums
        assert verify(out, manifest.path, source).problems == ()
        assert manifest.patches == () or not self.exact

    def test_no_fault_is_a_clean_copy(self, source: Path, arrays: dict[str, Array]) -> None:
        out, manifest = self.altered(source, plan_for(source, arrays, count=0))
        assert files_of(out) == files_of(source)
        assert len(manifest.faults) == manifest.summary()["faults"] == 0
        assert verify(out, manifest.path, source).problems == ()
        undo(out)
        assert files_of(out) == files_of(source)

    def test_the_same_seed_gives_the_same_file_and_another_seed_does_not(
        self, source: Path, arrays: dict[str, Array], plan: FaultPlan
    ) -> None:
        out, first = self.altered(source, plan)
        again, second = self.altered(source, plan_for(source, arrays), "again")
        other, _ = self.altered(source, plan_for(source, arrays, seed=2), "other")
        assert files_of(out) == files_of(again) != files_of(other)
        assert read_manifest(first.path).spec == read_manifest(second.path).spec

    def test_the_source_is_never_touched(self, source: Path, plan: FaultPlan) -> None:
        files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        for path in files:
            os.utime(path, ns=(10**18, 10**18))
        former = files_of(source)
        out, manifest = self.altered(source, plan)
        verify(out, manifest.path, source)
        assert files_of(source) == former
        assert {path.stat().st_mtime_ns for path in files} == {10**18}
