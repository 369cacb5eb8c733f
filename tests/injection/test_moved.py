"""Archives that are written anew, whose entries move: their manifest puts them together again."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from flipper.checkpoints import open_checkpoint
from flipper.errors import FlipperError, MismatchError
from flipper.faults.draw import draw
from flipper.faults.model import FaultModel
from flipper.injection import moved
from flipper.injection.inject import inject
from flipper.injection.manifest import Manifest
from flipper.injection.undo import undo


def archive(path: Path, deflated: str) -> Path:
    """Two tensors saved by torch; the entry whose name ends with `deflated` (all for "") packed, the other as it is."""
    torch.manual_seed(1)
    torch.save({"a": torch.randn(40, 30).round(decimals=1), "b": torch.randn(500)}, path.with_suffix(".saved"))
    with zipfile.ZipFile(path.with_suffix(".saved")) as saved, zipfile.ZipFile(path, "w") as packed:
        packed.comment = b"kept"
        for info in saved.infolist():
            kind = zipfile.ZIP_DEFLATED if info.filename.endswith(deflated) else zipfile.ZIP_STORED
            packed.writestr(info.filename, saved.read(info), kind)
    path.with_suffix(".saved").unlink()
    return path


def altered(source: Path) -> tuple[Path, Manifest]:
    with open_checkpoint(source) as checkpoint:
        plan = draw(checkpoint, FaultModel(count=300), 1)
    out = source.with_name("out" + source.suffix)
    manifest = inject(source, out, plan, force=True)
    assert {row["tensor"] for row in manifest.faults} == {"a", "b"}
    return out, manifest


@pytest.mark.parametrize("deflated", ["", "/data/0", "/data/1"])
def test_packed_and_stored_entries_are_put_back(deflated: str, tmp_path: Path) -> None:
    source = archive(tmp_path / "model.pt", deflated)
    out, manifest = altered(source)
    assert manifest.rewritten
    assert out.stat().st_size != source.stat().st_size
    out.chmod(0o640)
    undo(out)
    assert out.read_bytes() == source.read_bytes()
    assert out.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "out.pt"]


def test_an_entry_that_no_directory_names_comes_back_too(tmp_path: Path) -> None:
    """The copy does without it."""
    source = archive(tmp_path / "model.pt", "")
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(source) as packed, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as again:
        again.writestr("gone", b"deleted by a program that only leaves it out of the directory")
        again.filelist.clear()
        for info in packed.infolist():
            again.writestr(info.filename, packed.read(info))
    out, _ = altered(other)
    assert b"gone" not in out.read_bytes()
    undo(out)
    assert out.read_bytes() == other.read_bytes()


def test_shards_of_both_kinds_are_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {"a": torch.randn(300), "b": torch.randn(300)}
    for name, tensor in tensors.items():
        torch.save({name: tensor}, folder / f"{name}.bin")
    with zipfile.ZipFile(folder / "a.bin") as saved, zipfile.ZipFile(tmp_path / "packed", "w", 8) as packed:
        for info in saved.infolist():
            packed.writestr(info.filename, saved.read(info))
    shutil.move(tmp_path / "packed", folder / "a.bin")
    index = {"metadata": {}, "weight_map": {name: f"{name}.bin" for name in tensors}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    out, _ = altered(folder)
    for name in tensors:
        assert (out / f"{name}.bin").read_bytes() != (folder / f"{name}.bin").read_bytes()
    (out / "a.bin").write_bytes((folder / "a.bin").read_bytes())  # as after an undo that was killed half way
    undo(out)
    for name in tensors:
        assert (out / f"{name}.bin").read_bytes() == (folder / f"{name}.bin").read_bytes()


def test_through_a_link_the_file_that_it_leads_to_is_put_back(tmp_path: Path) -> None:
    source = archive(tmp_path / "model.pt", "")
    out, _ = altered(source)
    moved_away = out.rename(tmp_path / "elsewhere.pt")
    out.symlink_to(moved_away)
    undo(out)
    assert out.is_symlink()
    assert moved_away.read_bytes() == source.read_bytes()


def test_what_was_put_back_already_stays(tmp_path: Path) -> None:
    source = archive(tmp_path / "model.pt", "")
    out, manifest = altered(source)
    kept = shutil.copy(manifest.path, tmp_path / "kept.json")
    undo(out)
    undo(out, kept)
    assert out.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("other", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"Q" + data[1:]])
def test_a_file_that_is_another_is_refused_and_kept(other, tmp_path: Path) -> None:
    source = archive(tmp_path / "model.pt", "")
    with zipfile.ZipFile(source) as packed:
        struck = packed.infolist()[0].filename
    assert struck.endswith("data.pkl")  # which no fault changes, so that its byte is not looked at
    out, manifest = altered(source)
    first = manifest.patches[0].offset
    data = out.read_bytes()
    changed = data[:first] + other(data[first:])
    out.write_bytes(changed)
    with pytest.raises(MismatchError, match="nothing was undone"):
        undo(out)
    assert out.read_bytes() == changed
    assert manifest.path.exists()


def test_what_is_too_large_to_be_recorded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = archive(tmp_path / "model.pt", "/data/0")
    _, manifest = altered(source)
    needed = sum(len(patch.before) + len(patch.after) for patch in manifest.patches)
    for limit in (needed - 1, 10):
        monkeypatch.setattr(moved, "RECORDED", limit)
        out, manifest = altered(source)
        assert manifest.patches == ()
        data = out.read_bytes()
        with pytest.raises(FlipperError, match="take the source again"):
            undo(out)
        assert out.read_bytes() == data
    monkeypatch.setattr(moved, "RECORDED", needed)
    out, _ = altered(source)
    undo(out)
    assert out.read_bytes() == source.read_bytes()
