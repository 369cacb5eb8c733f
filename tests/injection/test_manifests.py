"""Manifests: inline or with a table, reproducible, refused when damaged; replay under other names and elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from checkpoint_makers import drawn, gzip_file, listed, names_in, noise, safetensors_file, torch_file
from safetensors.numpy import save_file

from flipper.errors import FlipperError, MismatchError, UsageError
from flipper.faults.plan import Target, plan_of
from flipper.injection import differences
from flipper.injection.inject import inject
from flipper.injection.manifest import read_manifest
from flipper.injection.recording import Record
from flipper.injection.replay import replay_plan
from flipper.injection.undo import undo
from flipper.injection.verify import verify


def rows_struck(path: Path, count: int) -> Any:
    """A plan of exactly `count` rows."""
    return listed("a.weight", *((flat, "flip", 1 << flat % 32, 0) for flat in range(count)))


def test_ten_thousand_rows_stand_inline_and_one_more_goes_to_a_table(tmp_path: Path) -> None:
    source = safetensors_file(tmp_path, 12_000)
    few = inject(source, tmp_path / "few", rows_struck(source, 10_000))
    many = inject(source, tmp_path / "many", rows_struck(source, 10_001))
    assert "few.flipper.npz" not in names_in(tmp_path)
    inline = json.loads(few.path.read_text())["faults"]
    assert len(inline) == 10_000
    named = json.loads(many.path.read_text())["faults"]
    assert named.keys() == {"file", "count", "sha256"}
    assert (named["file"], named["count"]) == ("many.flipper.npz", 10_001)
    read = read_manifest(many.path)
    keys = ("tensor", "flat", "index", "mask", "before", "after", "offset")
    assert [[row[key] for key in keys] for row in read.faults[:10_000]] == [
        [row[key] for key in keys] for row in inline
    ]
    for made, name in ((few, "few"), (many, "many")):
        again = inject(source, tmp_path / f"{name}-again", replay_plan(made.path))
        assert (tmp_path / name).read_bytes() == (tmp_path / f"{name}-again").read_bytes()
        assert len(again.table) == len(made.table)
        assert verify(tmp_path / name, made.path, source).problems == ()
        undo(tmp_path / name)
        assert (tmp_path / name).read_bytes() == source.read_bytes()
        assert not made.path.exists()
    assert not (tmp_path / "many.flipper.npz").exists()


def test_a_table_that_was_altered_or_is_gone_is_refused(tmp_path: Path) -> None:
    source = safetensors_file(tmp_path, 12_000)
    made = inject(source, tmp_path / "out", rows_struck(source, 10_001))
    table = tmp_path / "out.flipper.npz"
    whole, altered = table.read_bytes(), bytearray(table.read_bytes())
    altered[len(altered) // 2] ^= 1
    out = (tmp_path / "out").read_bytes()
    for data in (bytes(altered), whole[:-1], b"", None):
        table.unlink()
        if data is not None:
            table.write_bytes(data)
        for use in (lambda: undo(tmp_path / "out"), lambda: replay_plan(made.path)):
            with pytest.raises(FlipperError, match=r"sha256 differs|needs it"):
                use()
        table.write_bytes(whole)
    assert (tmp_path / "out").read_bytes() == out
    undo(tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "count"),
    [(torch_file, 200), (gzip_file, 200), (lambda folder: safetensors_file(folder, 20_000), 14_000)],
    ids=["torch", "gzip", "long-table"],
)
@pytest.mark.parametrize("how", ["no-provenance", "epoch"])
def test_two_runs_give_equal_bytes(make, count: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, manifest and table, in other folders too when no provenance stands in them."""
    note = Record(provenance=how != "no-provenance", digests=True, argv=("flipper",))
    if how == "epoch":
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    found = []
    for name in ("one", "other") if how == "no-provenance" else ("one", "one"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        source = folder / "source"
        make(folder).rename(source)
        inject(source, folder / "out", drawn(source, count=count), record=note, force=True)
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1]
    document = json.loads(found[0]["out.flipper.json"])
    assert document["created"] == (None if how == "no-provenance" else "2023-11-14T22:13:20Z")
    if how == "no-provenance":
        assert str(tmp_path) not in found[0]["out.flipper.json"].decode()
        assert document["argv"] == []


def test_the_document_has_what_the_contract_names(tmp_path: Path) -> None:
    source = torch_file(tmp_path)
    plan = drawn(source, 7, count=3, bits="exponent")
    inject(source, tmp_path / "bad.pt", plan, record=Record(digests=True, argv=("flipper", "inject")))
    document = json.loads((tmp_path / "bad.pt.flipper.json").read_text())
    assert {
        "schema", "flipper", "created", "argv", "seed", "draw", "source", "output", "spec", "population", "strata",
        "faults", "patches",
    } <= document.keys()  # fmt: skip
    assert document["source"].keys() == document["output"].keys() | {"format"}
    assert (document["seed"], document["draw"]) == (7, "flipper-draw/1")
    assert document["spec"]["bits"] == "exponent"
    assert document["source"]["size"] == source.stat().st_size == document["output"]["size"]
    assert document["population"].keys() == {"tensors", "elements", "bits", "bits_by_role"}
    assert [stratum["name"] for stratum in document["strata"]] == ["all"]
    assert all(row["fields"] == ["exponent"] and row["file"] == "bad.pt" for row in document["faults"])
    slots = {patch["offset"] for patch in document["patches"]}
    data = (tmp_path / "bad.pt").read_bytes()
    assert all(data[patch["offset"] :].startswith(bytes.fromhex(patch["after"])) for patch in document["patches"])
    assert len(slots) == 2 * len({row["tensor"] for row in document["faults"]})  # descriptor and directory


def test_the_file_of_a_row_is_relative_to_the_manifest(tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    (tmp_path / "records").mkdir()
    place = tmp_path / "records" / "m.json"
    inject(source, tmp_path / "out", drawn(source), record=Record(path=place))
    (row,) = json.loads(place.read_text())["faults"]
    assert row["file"] == os.path.join("..", "out")
    undo(tmp_path / "out", place)
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


def test_names_that_lead_out_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    """Else undoing by somebody's manifest would write wherever it says."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"abcdef")
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors_file(folder)
    made = inject(folder, tmp_path / "out", drawn(folder))
    document = json.loads(made.path.read_text())
    patch = {"file": "../victim", "offset": 0, "before": "58", "after": "61"}
    for change in ({"patches": [patch]}, {"patches": [{**patch, "file": str(victim)}]}, {"sizes": {"../victim": 1}},
                   {"patches": [{**patch, "offset": -1, "file": "model.safetensors"}]},
                   {"sizes": {"model.safetensors": -5}}, {"patches": [{**patch, "offset": 1 << 70}]}):  # fmt: skip
        made.path.write_text(json.dumps(document | change))
        with pytest.raises(FlipperError):
            undo(tmp_path / "out")
        assert victim.read_bytes() == b"abcdef"


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": 5}, {"flat": -1}, {"flat": 1 << 70}, {"flat": "x"}, {"mask": 7}, {"mask": "0x1" + "0" * 16},
        {"dtype": "float33"}, {"op": "turn"}, {"aliases": 3}, {"offset": "far"}, {"before": None}, {"value": "zz"},
        {"flat": 4000}, {"flat": 1.5}, {"flat": True}, {"offset": 1.5}, {"offset": -2}, {"file": None},
        {"aliases": "ab"}, {"aliases": [1]}, {"before": "0x1"}, {"after": "-0x1"}, {"mask": "0x3"}, {"op": "write"},
        {"dtype": ["float32"]},
    ],
)  # fmt: skip
def test_damaged_rows_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    made = inject(source, tmp_path / "out", drawn(source))
    document = json.loads(made.path.read_text())
    document["faults"][0].update(change)
    made.path.write_text(json.dumps(document))
    for use in (lambda: undo(tmp_path / "out"), lambda: replay_plan(made.path), lambda: verify(source, made.path)):
        with pytest.raises(FlipperError):
            use()


@pytest.mark.parametrize("order", [[0, 0, 1, 2], [0, 1, 1], [2, 1, 0], [1, 0]])
def test_rows_that_are_not_one_an_element_in_their_order_are_refused(order: list[int], tmp_path: Path) -> None:
    """Undoing an element twice would leave it struck, and say that it was undone."""
    source = safetensors_file(tmp_path)
    made = inject(source, tmp_path / "out", drawn(source, layers=["a.weight"], count=3))
    struck = (tmp_path / "out").read_bytes()
    document = json.loads(made.path.read_text())
    document["faults"] = [document["faults"][index] for index in order]
    made.path.write_text(json.dumps(document))
    for use in (lambda: undo(tmp_path / "out"), lambda: replay_plan(made.path), lambda: verify(source, made.path)):
        with pytest.raises(FlipperError, match="one an element"):
            use()
    assert (tmp_path / "out").read_bytes() == struck


@pytest.mark.parametrize(
    "change",
    [
        {"output": None}, {"source": []}, {"spec": [1]}, {"spec": None}, {"population": 5}, {"drawn": "many"},
        {"drawn": True}, {"seed": "x"}, {"seed": 1.5}, {"draw": 1}, {"strata": {}}, {"argv": None}, {"flipper": None},
        {"created": 5}, {"keep_checksums": "no"}, {"rewritten": 0}, {"sizes": []}, {"patches": None}, {"targets": {}},
        {"faults": None}, {"faults": "abc"}, {"faults": {"file": "x.npz"}}, {"faults": {"file": 5, "sha256": "a"}},
        {"targets": [{"name": "w", "shape": ["a"]}]}, {"targets": [{"name": "w", "shape": [-1]}]}, {"targets": [5]},
    ],
)  # fmt: skip
def test_a_member_of_another_kind_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    made = inject(source, tmp_path / "out", drawn(source))
    made.path.write_text(json.dumps(json.loads(made.path.read_text()) | change))
    with pytest.raises(FlipperError, match="manifest"):
        read_manifest(made.path)


@pytest.mark.parametrize(
    "patch",
    [
        {"offset": 10**12, "before": "00000000", "after": "01020304"},
        {"offset": 100_000, "before": "", "after": "0102"},
        {"offset": 0, "before": "0102", "after": ""},
        {"offset": -1, "before": "00", "after": "01"},
    ],
)
def test_a_patch_outside_the_file_is_refused(patch: dict[str, Any], tmp_path: Path) -> None:
    """Undoing it would make the file grow, by a terabyte of nothing if need be."""
    source = safetensors_file(tmp_path)
    made = inject(source, tmp_path / "out", drawn(source))
    struck = (tmp_path / "out").read_bytes()
    document = json.loads(made.path.read_text())
    document["patches"] = [{"file": "", **patch}]
    made.path.write_text(json.dumps(document))
    with pytest.raises(FlipperError):
        undo(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == struck


@pytest.mark.parametrize("change", [{"shape": [4000, 1]}, {"shape": [5000]}, {"dtype": "int32"}])
def test_undo_refuses_a_tensor_of_another_dtype_or_shape(change: dict[str, Any], tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    made = inject(source, tmp_path / "out", drawn(source))
    document = json.loads(made.path.read_text())
    document["targets"][0].update(change)
    document["faults"][0]["dtype"] = change.get("dtype", "float32")
    made.path.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match="not of the dtype and shape"):
        undo(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": "flipper-manifest/1"}', "[" * 100_000, "\xff"])
def test_what_is_no_manifest_is_refused(text: str, tmp_path: Path) -> None:
    place = tmp_path / "m.json"
    place.write_bytes(text.encode("latin-1"))
    with pytest.raises(FlipperError, match="manifest"):
        read_manifest(place)


def test_renamed_tensors_are_struck_in_another_scheme(tmp_path: Path) -> None:
    save_file({"layer.0.weight": noise(30), "layer.1.weight": noise(30)}, tmp_path / "a")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["blocks/0/w"], file["blocks/1/w"] = noise(30), noise(30)
    made = inject(tmp_path / "a", tmp_path / "a-bad", drawn(tmp_path / "a", count=40))
    plan = replay_plan(made.path, [r"re:layer\.(\d+)\.weight=blocks/\1/w"])
    inject(tmp_path / "b.h5", tmp_path / "b-bad.h5", plan)
    old = {f"layer.{i}.weight": np.fromfile(tmp_path / "a", "<u4")[-60:].reshape(2, 30)[i] for i in range(2)}
    new = {f"layer.{i}.weight": np.fromfile(tmp_path / "a-bad", "<u4")[-60:].reshape(2, 30)[i] for i in range(2)}
    with h5py.File(tmp_path / "b-bad.h5") as file:
        for i in range(2):
            name = f"layer.{i}.weight"
            xor = file[f"blocks/{i}/w"][()].view("<u4") ^ noise(30).view("<u4")
            assert np.array_equal(xor, old[name] ^ new[name])
    for renames, text in (
        (["layer.0=layer.1"], "makes two tensors one"),
        (["head=tail"], "matches none"),
        (["re:(=x"], "re:"),
        (["layer"], "PREFIX=REPLACEMENT"),
    ):
        with pytest.raises(UsageError, match=text):
            replay_plan(made.path, renames)
    with pytest.raises(UsageError, match="has no tensor"):
        inject(tmp_path / "b.h5", tmp_path / "c", replay_plan(made.path))


def test_another_dtype_or_shape_is_refused(tmp_path: Path) -> None:
    save_file({"w": noise(30)}, tmp_path / "a")
    made = inject(tmp_path / "a", tmp_path / "bad", drawn(tmp_path / "a"))
    for name, values in (("b", noise(30).astype("f8")), ("c", noise(30).reshape(5, 6))):
        save_file({"w": values}, tmp_path / name)
        with pytest.raises(MismatchError, match="here and"):
            inject(tmp_path / name, tmp_path / "out", replay_plan(made.path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("effect", ["set0", "set1", "random", "scale:0.5", "scale:-1e30"])
def test_writes_are_replayed_as_writes(effect: str, tmp_path: Path) -> None:
    """On other values they put the same bits; unchanged elements are counted."""
    source = safetensors_file(tmp_path)
    made = inject(source, tmp_path / "bad", drawn(source, count=50, effect=effect))
    save_file({"a.weight": noise(4000, seed=8), "b.weight": noise(4000, seed=9)}, tmp_path / "other")
    again = inject(tmp_path / "other", tmp_path / "other-bad", replay_plan(made.path))
    for one, two in zip(made.faults, again.faults, strict=True):
        assert (one["op"], one["mask"], one["value"]) == (two["op"], two["mask"], two["value"])
        mask, value = int(one["mask"], 16), int(one["value"], 16)
        for row in (one, two):
            assert int(row["after"], 16) == int(row["before"], 16) & ~mask | value & mask
    assert made.summary()["unchanged"] == sum(row["before"] == row["after"] for row in made.faults)


def test_the_same_bytes_under_two_names_are_refused(tmp_path: Path) -> None:
    """Overlapping views: a plan may strike either, not one element through both."""
    base = torch.arange(12.0)
    torch.save({"left": base[:8], "right": base[4:], "even": base[::2]}, tmp_path / "a.pt")

    def plan(*rows: tuple[int, int]) -> Any:
        return plan_of([Target("even"), Target("left"), Target("right")], [(*row, 0, 1, 0) for row in rows])

    inject(tmp_path / "a.pt", tmp_path / "fine.pt", plan((0, 5), (1, 4), (2, 5)))
    loaded = torch.load(tmp_path / "fine.pt")
    assert torch.equal(loaded["left"][4:], loaded["right"][:4])
    for rows in (((1, 4), (2, 0)), ((0, 3), (2, 2))):
        with pytest.raises(MismatchError, match="share bytes"):
            inject(tmp_path / "a.pt", tmp_path / "out.pt", plan(*rows))
        with pytest.raises(MismatchError, match="share bytes"):
            inject(tmp_path / "a.pt", None, plan(*rows))
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("compression", ["gzip", "lzf"])
@pytest.mark.parametrize("filled", [0, 100, 400])
@pytest.mark.parametrize("block", [differences.BLOCK, 256])
def test_chunks_that_change_their_size_are_altered_and_undone(
    compression: str, filled: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 may cut the file then, or make it longer: in place gives what a copy gives, undo what was there."""
    monkeypatch.setattr(differences, "BLOCK", block)  # less than what the file grows by
    path = tmp_path / "a.h5"
    values = np.random.default_rng(0).integers(0, 2**32, 400, np.uint32)
    noisy, values[:filled] = values.copy(), 0
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=values.view("f4"), chunks=(400,), compression=compression)
        file.create_dataset("b", data=values[::-1].view("f4"), chunks=(400,), compression=compression)
    former = path.read_bytes()
    for name, new in (("b", np.zeros(400, int)), ("a", noisy), ("b", noisy), ("a", np.zeros(400, int))):
        plan = listed(name, *((flat, "write", 0xFFFFFFFF, value) for flat, value in enumerate(new.tolist())))
        inject(path, tmp_path / "copy.h5", plan, force=True)
        made = inject(path, None, plan)
        assert path.read_bytes() == (tmp_path / "copy.h5").read_bytes()
        assert read_manifest(made.path).output["size"] == path.stat().st_size
        with h5py.File(path) as file:
            assert np.array_equal(file[name][()].view("u4"), new)
    for _ in range(4):
        undo(path)
    assert path.read_bytes() == former


def test_a_directory_with_links_becomes_one_of_files(tmp_path: Path) -> None:
    """As the Hugging Face cache keeps snapshots; folders that are linked come along, loops end."""
    blobs, source = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    source.mkdir()
    safetensors_file(blobs).rename(blobs / "0123")
    (blobs / "more").mkdir()
    (blobs / "more" / "notes.txt").write_text("words")
    (source / "model.safetensors").symlink_to(blobs / "0123")
    (source / "more").symlink_to(blobs / "more")
    (source / "loop").symlink_to(source)
    (source / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(source / "pipe")
    former = (blobs / "0123").read_bytes()
    inject(source, tmp_path / "out", drawn(source))
    out = tmp_path / "out"
    assert (out / "more" / "notes.txt").read_text() == "words"
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert (blobs / "0123").read_bytes() == former != (out / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="symbolic link"):
        inject(source, None, drawn(source))
    with pytest.raises(UsageError, match="lies inside the source"):
        inject(source, source / "out", drawn(source))
    undo(out)
    assert (out / "model.safetensors").read_bytes() == former
