"""atomic_output: the target is whole or untouched, and nothing else is ever left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flipper.checkpoints.output import atomic_output
from flipper.errors import FlipperError, OutputError, UsageError


def write(path: Path, text: str, force: bool = False) -> None:
    with atomic_output(path, force) as temporary:
        temporary.write_text(text)


def run(path: Path, act: Callable[[Path], object], **options: bool) -> None:
    """Write something, then act on the temporary path."""
    with atomic_output(path, **options) as temporary:
        (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
        act(temporary)


def raiser(error: BaseException) -> Callable[[Path], object]:
    def fail(temporary: Path) -> None:
        raise error

    return fail


def fill(path: Path, name: str, force: bool = False) -> None:
    with atomic_output(path, force, directory=True) as temporary:
        (temporary / name).write_text("content")


def test_the_file_appears_when_the_block_ends_and_not_before(tmp_path):
    target = tmp_path / "out.bin"
    with atomic_output(target) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.bin"]


def test_an_existing_file_is_refused_and_kept(tmp_path):
    target = tmp_path / "out.bin"
    target.write_text("old")
    with pytest.raises(OutputError, match="exists; --force overwrites"):
        write(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.bin"]


def test_a_file_that_appears_during_the_block_is_kept(tmp_path):
    target = tmp_path / "out.bin"
    with pytest.raises(OutputError, match="exists"):
        run(target, lambda temporary: target.write_text("somebody else's"))
    assert target.read_text() == "somebody else's"
    assert os.listdir(tmp_path) == ["out.bin"]


def test_force_replaces_a_file(tmp_path):
    target = tmp_path / "out.bin"
    target.write_text("old")
    write(target, "new", force=True)
    assert target.read_text() == "new"


def test_force_replaces_a_symbolic_link_and_not_its_target(tmp_path):
    blob = tmp_path / "blob"
    blob.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(blob)
    with pytest.raises(OutputError, match="exists"):
        write(link, "new")
    write(link, "new", force=True)
    assert not link.is_symlink()
    assert link.read_text() == "new"
    assert blob.read_text() == "precious"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), UsageError("theirs")])
def test_a_failing_block_leaves_nothing_and_its_error_passes(tmp_path, error):
    target = tmp_path / "out.bin"
    target.write_text("old")
    with pytest.raises(type(error)):
        run(target, raiser(error), force=True)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.bin"]


def test_a_full_disk_is_one_clear_line(tmp_path):
    full = raiser(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OutputError, match=r"out.bin can't be written: No space left on device$"):
        run(tmp_path / "out.bin", full)
    assert os.listdir(tmp_path) == []


def test_an_hdf5_error_on_a_full_disk_names_the_cause(tmp_path):
    text = "Can't write data (file write failed: time = Mon\n, errno = 28, error message = 'No space left on device')"
    with pytest.raises(OutputError, match=r"can't be written: No space left on device$"):
        run(tmp_path / "out.bin", raiser(OSError(text)))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"there is no folder .*nowhere"):
        write(tmp_path / "nowhere" / "out.bin", "new")


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_path_without_a_name_is_refused(name):
    with pytest.raises(OutputError, match="names no file"):
        write(Path(name), "new", force=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            write(tmp_path / "out.bin", "new")
    finally:
        tmp_path.chmod(0o755)


def test_a_device_is_not_replaced():
    with pytest.raises(OutputError, match="no regular file"):
        write(Path("/dev/null"), "new", force=True)


def test_the_new_file_follows_the_umask(tmp_path):
    former = os.umask(0o027)
    try:
        write(tmp_path / "out.bin", "new")
    finally:
        os.umask(former)
    assert (tmp_path / "out.bin").stat().st_mode & 0o777 == 0o640


def test_a_longest_legal_name_works(tmp_path):
    write(tmp_path / ("n" * 255), "new")
    assert os.listdir(tmp_path) == ["n" * 255]


def test_a_directory_appears_whole(tmp_path):
    target = tmp_path / "out"
    with atomic_output(target, directory=True, sync=True) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("content")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "content"
    assert os.listdir(tmp_path) == ["out"]


def test_an_existing_directory_needs_force_and_a_checkpoint_in_it(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match="exists"):
        fill(target, "new")
    with pytest.raises(OutputError, match="holds no checkpoint"):
        fill(target, "new", force=True)
    assert os.listdir(target) == ["thesis.tex"]
    (target / "thesis.tex").unlink()
    fill(target, "new", force=True)
    assert os.listdir(target) == ["new"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_directory_that_holds_a_checkpoint_is_replaced_with_force(tmp_path, monkeypatch):
    monkeypatch.setattr("flipper.checkpoints.output._replaceable", lambda folder: True)
    target = tmp_path / "out"
    fill(target, "first")
    fill(target, "second", force=True)
    assert os.listdir(target) == ["second"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_failing_block_leaves_the_old_directory(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(FlipperError):
        run(target, raiser(OutputError("no")), force=True, directory=True)
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == []


def test_files_and_directories_never_replace_each_other(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    with pytest.raises(OutputError, match="is a directory"):
        write(tmp_path / "folder", "new", force=True)
    with pytest.raises(OutputError, match="is no directory"):
        fill(tmp_path / "file", "new", force=True)
