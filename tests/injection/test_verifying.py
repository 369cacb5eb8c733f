"""verify: one wrong byte anywhere is found; what was not checked is not claimed."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_makers import drawn, gzip_file, safetensors_file, torch_file

from flipper.errors import CheckpointError, FlipperError, UsageError
from flipper.injection.inject import inject
from flipper.injection.recording import Record
from flipper.injection.replay import replay_plan
from flipper.injection.verify import explain, verify

SAMPLES = Path(__file__).parent.parent.parent / "sample_checkpoints"


def deflated(folder: Path) -> Path:
    path = torch_file(folder)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(folder / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(zipfile.ZipInfo(entry.filename), old.read(entry), zipfile.ZIP_DEFLATED)
    return folder / "deflated.pt"


def problems_of(out: Path, manifest: Path, source: Path) -> tuple[str, ...]:
    """Also of a file that no longer opens."""
    try:
        verdict = verify(out, manifest, source)
    except CheckpointError as error:
        return (str(error),)
    assert verdict.complete
    return verdict.problems


@pytest.mark.parametrize("make", [safetensors_file, torch_file, gzip_file, deflated])
def test_any_byte_that_was_changed_besides_is_found(make, tmp_path: Path) -> None:
    """Headers, padding, pickles, checksums, indexes, elements: a hundred bytes spread over the file."""
    source = make(tmp_path)
    out = tmp_path / "out"
    made = inject(source, out, drawn(source, count=10))
    assert problems_of(out, made.path, source) == ()
    whole = out.read_bytes()
    places = np.linspace(0, len(whole) - 1, 100).astype(int).tolist()
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1
        out.write_bytes(data)
        assert problems_of(out, made.path, source), place
    for data in (whole[:-1], whole + b"\0"):
        out.write_bytes(data)
        assert problems_of(out, made.path, source)


def test_the_recorded_digest_finds_them_too(tmp_path: Path) -> None:
    source = torch_file(tmp_path)
    out = tmp_path / "out.pt"
    made = inject(source, out, drawn(source, count=10), record=Record(digests=True))
    verdict = verify(out, made.path)
    assert verdict.complete
    assert not verdict.problems
    data = bytearray(out.read_bytes())
    data[made.faults[0]["offset"] - 1] ^= 4
    out.write_bytes(data)
    assert any("sha256" in problem for problem in verify(out, made.path).problems)


def test_a_fault_that_was_not_made_is_named(tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    out = tmp_path / "out"
    made = inject(source, out, drawn(source, count=3))
    row = made.faults[1]
    data = bytearray(out.read_bytes())
    struct.pack_into("<I", data, row["offset"], int(row["before"], 16))
    out.write_bytes(data)
    verdict = verify(out, made.path)
    assert len(verdict.problems) == 1
    assert row["tensor"] in verdict.problems[0]
    assert f"element {row['flat']}" in verdict.problems[0]
    assert not verdict.complete
    assert "problems: 1" in explain(verdict)


def test_stale_checksums_are_a_problem_unless_meant(tmp_path: Path) -> None:
    source = torch_file(tmp_path)
    out = tmp_path / "out.pt"
    made = inject(source, out, drawn(source, count=3), record=Record(keep_checksums=True))
    assert verify(out, made.path, source).problems == ()
    assert any("CRC" in problem for problem in verify(out).problems)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is not None


def test_a_source_that_is_another_is_told(tmp_path: Path) -> None:
    source = safetensors_file(tmp_path)
    out = tmp_path / "out"
    made = inject(source, out, drawn(source, count=3))
    other = torch_file(tmp_path)
    assert "not its source" in verify(out, made.path, other).problems[0]
    assert verify(out, made.path, SAMPLES / "digits-mlp.safetensors").problems
    with pytest.raises(UsageError, match="--manifest"):
        verify(out, None, source)
    with pytest.raises(FlipperError):
        verify(out, source, source)


def test_the_other_files_of_a_directory_count(tmp_path: Path) -> None:
    """Index and configuration too; without the source nothing is claimed about them."""
    source = tmp_path / "source"
    shutil.copytree(SAMPLES / "digits-cnn-sharded", source)
    (source / "config.json").write_text("{}")
    out = tmp_path / "out"
    made = inject(source, out, drawn(source, count=5))
    assert verify(out, made.path, source).problems == ()
    (out / "config.json").write_text("[]")
    assert "config.json" in verify(out, made.path, source).problems[0]
    verdict = verify(out, made.path)
    assert not verdict.problems
    assert not verdict.complete
    (out / "config.json").unlink()
    assert "is not there" in verify(out, made.path, source).problems[0]


def test_a_file_that_the_source_lacks_is_a_problem(tmp_path: Path) -> None:
    """But not the record, wherever it lies, nor what a link in the source leads to."""
    source = tmp_path / "source"
    shutil.copytree(SAMPLES / "digits-cnn-sharded", source)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokens.txt").write_text("a b c")
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "round").symlink_to(source)
    out = tmp_path / "out"
    made = inject(source, out, drawn(source, count=5))
    assert verify(out, made.path, source).problems == ()
    shutil.move(made.path, out)
    inside = out / made.path.name
    assert verify(out, inside, source).problems == ()
    (out / "linked" / "more.bin").write_bytes(b"x")
    (problem,) = verify(out, inside, source).problems
    assert problem == f"{out / 'linked' / 'more.bin'} is not in the source"
    (out / "linked" / "tokens.txt").write_text("a b d")
    assert "is not as in the source" in verify(out, inside, source).problems[0]


def test_a_directory_s_shards_are_checked_byte_by_byte(tmp_path: Path) -> None:
    source = SAMPLES / "digits-cnn-dcp"
    out = tmp_path / "out"
    made = inject(source, out, drawn(source, count=5), record=Record(digests=True))
    assert verify(out, made.path, source).problems == verify(out, made.path).problems == ()
    for name in ("__0_0.distcp", "__1_0.distcp"):
        whole = (out / name).read_bytes()
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        (out / name).unlink()
        (out / name).write_bytes(data)
        assert verify(out, made.path, source).problems
        assert verify(out, made.path).problems
        (out / name).write_bytes(whole)


def test_replayed_faults_verify_in_the_other_format(tmp_path: Path) -> None:
    first = inject(SAMPLES / "digits-cnn.pt", tmp_path / "a", drawn(SAMPLES / "digits-cnn.pt", count=9))
    second = inject(SAMPLES / "digits-cnn.h5", tmp_path / "b", replay_plan(first.path))
    assert verify(tmp_path / "b", second.path, SAMPLES / "digits-cnn.h5").problems == ()
    assert verify(tmp_path / "b", first.path).problems == ()
    assert json.loads(second.path.read_text())["seed"] == first.seed
