"""What can't be done leaves nothing behind: full disks, missing folders, taken names, links, and the source itself."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_makers import drawn, gzip_file, listed, names_in, safetensors_file, torch_file

from flipper.errors import MismatchError, OutputError, UsageError
from flipper.injection import in_place, patching
from flipper.injection import inject as inject_module
from flipper.injection.inject import inject
from flipper.injection.manifest import ManifestFiles, manifest_output
from flipper.injection.recording import Record
from flipper.injection.undo import undo


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return safetensors_file(folder, 20_000)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 200 kB."""
    folder = tmp_path / "full"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_copy_onto_a_full_disk(source: Path, full: Path) -> None:
    filler = full / "filler"
    filler.write_bytes(b"x" * 180_000)
    for force in (False, True):
        with pytest.raises(OutputError, match="No space left"):
            inject(source, full / "out.safetensors", drawn(source), force=force)
        assert names_in(full) == ["filler"]


def test_a_manifest_onto_a_full_disk(source: Path, full: Path, tmp_path: Path) -> None:
    """The copy would fit, its record doesn't: neither is left."""
    (full / "filler").write_bytes(b"x" * 200_000)
    with pytest.raises(OutputError):
        inject(source, tmp_path / "out.safetensors", drawn(source, count=100), record=Record(path=full / "m.json"))
    with pytest.raises(OutputError):
        inject(source, None, drawn(source, count=100), record=Record(path=full / "m.json"))
    with pytest.raises(OutputError):
        inject(source, tmp_path / "out", drawn(source, count=14_000), record=Record(path=full / "m.json"))
    assert names_in(full) == ["filler"]
    assert names_in(tmp_path) == ["full", "source"]
    assert names_in(source.parent) == [source.name]


@pytest.mark.parametrize("make", [torch_file, gzip_file, safetensors_file])
def test_altering_in_place_on_a_full_disk(make, full: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(make(tmp_path), full))
    former = path.read_bytes()
    (full / "filler").write_bytes(b"x" * ((200_000 - len(former)) // 4096 * 4096))
    with pytest.raises(OutputError):
        inject(path, None, drawn(path, count=1500))
    assert path.read_bytes() == former
    assert names_in(full) == ["filler", path.name]


def test_a_limit_on_the_size_of_files(source: Path, tmp_path: Path) -> None:
    """What a quota does, without being root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    plan = drawn(source, count=5)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(OutputError, match="File too large"):
            inject(source, tmp_path / "out.safetensors", plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names_in(tmp_path) == ["source"]


def test_a_failure_half_way_through_an_altered_file_is_taken_back(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = source.read_bytes()
    write, calls = patching._write, []

    def failing(descriptor: int, data: np.ndarray, offset: int) -> None:
        calls.append(offset)
        if len(calls) == 1:
            write(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.EIO, "Input/output error")
        write(descriptor, data, offset)

    monkeypatch.setattr(patching, "_write", failing)
    with pytest.raises(OutputError, match=r"Input/output error; it is as it was"):
        inject(source, None, drawn(source, count=200))
    assert source.read_bytes() == former
    assert names_in(source.parent) == [source.name]


def test_a_disk_that_stays_broken_leaves_the_journal(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former, write = source.read_bytes(), patching._write

    def failing(descriptor: int, data: np.ndarray, offset: int) -> None:
        write(descriptor, data[: len(data) // 2], offset)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(patching, "_write", failing)
    with pytest.raises(OutputError, match="flipper undo"):
        inject(source, None, drawn(source, count=200))
    monkeypatch.setattr(patching, "_write", write)
    assert source.read_bytes() != former
    undo(source)
    assert source.read_bytes() == former


def test_a_record_that_fails_after_the_file_was_altered_takes_it_back(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, calls = source.read_bytes(), []

    def failing(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OutputError("the disk is full")
        write_manifest(*arguments, **options)

    write_manifest = in_place.write_manifest
    monkeypatch.setattr(in_place, "write_manifest", failing)
    with pytest.raises(OutputError, match="the disk is full; it is as it was"):
        inject(source, None, drawn(source, count=14_000), record=Record(digests=True))
    assert source.read_bytes() == former
    assert names_in(source.parent) == [source.name]


def test_what_could_not_be_put_back_is_told_with_the_command_that_does(tmp_path: Path) -> None:
    error = in_place._restored(Path("-a"), tmp_path / "its manifest", OSError(errno.EIO, "Input/output error"))
    assert str(error) == (
        f"-a: Input/output error; `flipper undo ./-a --manifest '{tmp_path}/its manifest'` restores it"
    )


def test_a_missing_folder_and_names_that_are_taken(source: Path, tmp_path: Path) -> None:
    plan = drawn(source)
    with pytest.raises(OutputError, match="there is no folder"):
        inject(source, tmp_path / "missing" / "out", plan)
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(OutputError, match="--force overwrites"):
        inject(source, taken, plan)
    (tmp_path / "out.flipper.json").write_text("mine")
    with pytest.raises(OutputError, match="--force overwrites"):
        inject(source, tmp_path / "out", plan)
    with pytest.raises(OutputError, match="is a directory"):
        inject(source, source.parent, plan, force=True)
    assert taken.read_text() == (tmp_path / "out.flipper.json").read_text() == "mine"
    assert names_in(tmp_path) == ["out.flipper.json", "source", "taken"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(source: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        inject(source, closed / "out", drawn(source))


def test_a_read_only_filesystem(source: Path, full: Path) -> None:
    """Not even root may write there; neither a copy nor an injection in place leaves anything."""
    inside = Path(shutil.copy(source, full))
    former = inside.read_bytes()
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    with pytest.raises(OutputError, match="Read-only"):
        inject(source, full / "out", drawn(source))
    with pytest.raises(OutputError, match="Read-only"):
        inject(inside, None, drawn(inside))
    with pytest.raises(OutputError, match="Read-only"):
        inject(source, source.parent / "out", drawn(source), record=Record(path=full / "m.json"))
    assert inside.read_bytes() == former
    assert names_in(full) == [source.name]
    assert names_in(source.parent) == [source.name]


def test_a_folder_that_can_not_be_written_at_all(source: Path) -> None:
    """Not even by root."""
    with pytest.raises(OutputError):
        inject(source, "/proc/out.safetensors", drawn(source))


def test_the_source_is_never_the_output(source: Path, tmp_path: Path) -> None:
    plan, former = drawn(source), source.read_bytes()
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(source)
    os.link(source, hard)
    for output in (source, link, hard, source.parent / ".." / "source" / source.name):
        with pytest.raises(UsageError, match="is the source itself"):
            inject(source, output, plan, force=True)
    for place in (source, link, tmp_path / "new"):
        with pytest.raises(UsageError, match="the manifest can't lie"):
            inject(source, tmp_path / "new", plan, force=True, record=Record(path=place))
    with pytest.raises(UsageError, match="the manifest can't lie"):
        inject(source, None, plan, force=True, record=Record(path=source))
    assert source.read_bytes() == former
    assert names_in(tmp_path) == ["hard", "link", "source"]
    assert names_in(source.parent) == [source.name]


def test_in_place_refuses_links_unless_forced(source: Path, tmp_path: Path) -> None:
    plan, former = drawn(source), source.read_bytes()
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(source)
    with pytest.raises(UsageError, match="symbolic link"):
        inject(link, None, plan)
    os.link(source, hard)
    with pytest.raises(UsageError, match="2 hard links"):
        inject(source, None, plan)
    assert source.read_bytes() == former
    assert names_in(tmp_path) == ["hard", "link", "source"]
    inject(link, None, plan, force=True)
    assert hard.read_bytes() == source.read_bytes() != former
    undo(link)
    assert hard.read_bytes() == former


def test_a_copy_through_a_link_leaves_what_it_leads_to(source: Path, tmp_path: Path) -> None:
    """A symbolic link in the output's place is replaced itself, one as the source is followed."""
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(source)
    other.write_text("mine")
    out = tmp_path / "out"
    out.symlink_to(other)
    inject(link, out, drawn(source), force=True)
    assert other.read_text() == "mine"
    assert out.is_file()
    assert not out.is_symlink()


def test_a_failure_after_the_manifest_was_written_removes_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes the output's name meanwhile."""
    out = tmp_path / "out"

    @contextmanager
    def late(*arguments: Any) -> Iterator[ManifestFiles]:
        with manifest_output(*arguments) as files:
            yield files
        out.write_text("theirs")

    monkeypatch.setattr(inject_module, "manifest_output", late)
    with pytest.raises(OutputError, match="exists"):
        inject(source, out, drawn(source, count=14_000))
    assert names_in(tmp_path) == ["out", "source"]
    assert out.read_text() == "theirs"


def test_overwriting_a_file_drops_the_records_of_the_old_one(source: Path, tmp_path: Path) -> None:
    """Else the next undo would take the newest of them for its own."""
    out = tmp_path / "out"
    inject(source, out, drawn(source, count=14_000))
    inject(out, None, drawn(source, 2))
    inject(out, None, drawn(source, 3, count=14_000))
    assert len(names_in(tmp_path)) == 7
    inject(source, out, drawn(source, 4), force=True)
    assert names_in(tmp_path) == ["out", "out.flipper.json", "source"]
    undo(out)
    assert out.read_bytes() == source.read_bytes()


def test_a_table_beside_a_manifest_of_another_name_is_left(source: Path, tmp_path: Path) -> None:
    """--manifest m.json has nothing to do with the user's own m.npz."""
    mine = tmp_path / "m.npz"
    mine.write_text("mine")
    out = tmp_path / "out"
    inject(source, out, drawn(source), record=Record(path=tmp_path / "m.json"))
    inject(source, out, drawn(source), force=True, record=Record(path=tmp_path / "m.json"))
    undo(out, tmp_path / "m.json")
    assert mine.read_text() == "mine"
    with pytest.raises(OutputError, match="exists"):
        inject(source, tmp_path / "new", drawn(source, count=14_000), record=Record(path=tmp_path / "m.json"))
    assert mine.read_text() == "mine"


def test_undo_takes_the_newest_even_if_an_older_record_is_gone(source: Path) -> None:
    states = [source.read_bytes()]
    for seed in range(3):
        inject(source, None, drawn(source, seed))
        states.append(source.read_bytes())
    undo(source, source.with_name(f"{source.name}.flipper.json"))
    made = inject(source, None, drawn(source, 9))
    assert made.path.name.endswith(".flipper.4.json")
    for _ in range(3):
        undo(source)
    assert source.read_bytes() == states[0]
    with pytest.raises(UsageError, match="there is no"):
        undo(source)


def test_undo_refuses_bytes_that_are_neither_old_nor_new(tmp_path: Path) -> None:
    for make in (safetensors_file, torch_file, gzip_file):
        path = make(tmp_path)
        made = inject(path, None, drawn(path, count=20))
        data = bytearray(path.read_bytes())
        place = made.patches[0].offset if made.patches else made.faults[0]["offset"]
        data[place] ^= 0x55
        path.write_bytes(data)
        with pytest.raises(MismatchError, match="nothing was undone"):
            undo(path)
        assert path.read_bytes() == data
        assert made.path.exists()


def test_plans_that_do_not_fit_leave_nothing(source: Path, tmp_path: Path) -> None:
    bad = {
        "no tensor": (UsageError, listed("missing", (0, "flip", 1, 0))),
        "20000 elements": (MismatchError, listed("a.weight", (20_000, "flip", 1, 0))),
        "bits beyond": (MismatchError, listed("a.weight", (0, "flip", 1 << 32, 0))),
        "both flipped and written": (UsageError, listed("a.weight", (0, "flip", 1, 0), (0, "write", 2, 2))),
    }
    for text, (kind, plan) in bad.items():
        for output in (tmp_path / "out", None):
            with pytest.raises(kind, match=text):
                inject(source, output, plan)
    assert names_in(tmp_path) == ["source"]
    assert names_in(source.parent) == [source.name]
