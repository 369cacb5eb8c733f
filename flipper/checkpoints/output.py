"""Atomic output: a file or directory that appears under its name only when it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from flipper.checkpoints.formats import DIRECTORIES
from flipper.errors import FlipperError, OutputError

PIECE = 1 << 18
"""Bytes of a new file that are written together.

For larger writes the kernel wants runs of free memory that a virtual machine often has to ask its host for: 2 GiB took
2 to 6 s by 1 MiB and 0.7 s by 256 KiB.
"""


@contextmanager
def atomic_output(
    path: str | os.PathLike[str], force: bool = False, *, directory: bool = False, sync: bool = False
) -> Iterator[Path]:
    """Yield a fresh temporary file (or directory) beside `path`, which takes its place when the block ends well.

    force: replace what is there; else it is refused, before the block and after it. A symbolic link is replaced
    itself, never what it points to. A directory is replaced only by a directory, and only if it is empty or holds a
    checkpoint. sync: flush all to the disk before the name appears.
    Raises OutputError when the output exists or can't be written; an OSError of the block becomes one too. Whatever
    the block raises, nothing is left behind and what was there before is as it was.
    """
    target = Path(path)
    check_target(target, force, directory)
    temporary = target.parent / f".flipper-{os.urandom(6).hex()}.tmp"
    try:
        with writing(target):
            _create(temporary, directory)
            yield temporary
            if sync:
                _sync(temporary)
            check_target(target, force, directory)
            _replace(temporary, target)
            if sync:
                _flush(target.parent)
    finally:
        with suppress(OSError):
            _remove(temporary)


def unfinished(folder: Path) -> set[Path]:
    """What atomic outputs are about to become in this folder, or were when their process was killed."""
    return set(folder.glob(f".flipper-{'[0-9a-f]' * 12}.tmp"))


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn an OSError of the block into an OutputError that names `target`, what the block writes."""
    try:
        yield
    except FlipperError:
        raise
    except OSError as error:
        raise OutputError(f"{target} can't be written: {_cause(error)}") from error


def check_target(target: Path, force: bool, directory: bool) -> None:
    """Raise OutputError where `target` can't be written, or be replaced without `force`. directory: it is to be one."""
    if target.name in ("", ".."):
        raise OutputError(f"{str(target)!r} names no {'directory' if directory else 'file'} to write")
    if not target.parent.is_dir():
        raise OutputError(f"{target} can't be written: there is no folder {target.parent}")
    if not os.path.lexists(target):
        return
    if not force:
        raise OutputError(f"{target} exists; --force overwrites")
    if target.is_symlink() and not _leads_to_device(target):
        return
    if directory != target.is_dir():
        kind = "no" if directory else "a"
        raise OutputError(f"{target} is {kind} directory and is not replaced; choose another name")
    if directory and not _replaceable(target):
        raise OutputError(f"{target} holds no checkpoint and is not replaced; empty it or choose another name")
    if not directory and (target.is_symlink() or not target.is_file()):
        raise OutputError(f"{target} is no regular file; choose another name")


def _leads_to_device(link: Path) -> bool:
    """Whether a link is one of the system's, as /dev/stdout is, or leads to a device or pipe: these stay."""
    special = link.exists() and not link.is_file() and not link.is_dir()
    return special or os.readlink(link).startswith(("/proc/", "/dev/"))


def _replaceable(folder: Path) -> bool:
    """Whether a directory may go: `--force` with a mistyped name must not cost a home folder."""
    try:
        if not any(folder.iterdir()):
            return True
        return any(import_module(module).sniff(folder) for module, _ in DIRECTORIES.values())
    except OSError:
        return False


def _create(temporary: Path, directory: bool) -> None:
    if directory:
        temporary.mkdir()
    else:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))


def _replace(temporary: Path, target: Path) -> None:
    if not temporary.is_dir() or not os.path.lexists(target):
        os.replace(temporary, target)
        return
    former = temporary.with_suffix(".old")  # rename can't replace a directory that holds something
    os.rename(target, former)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(former, target)
        raise
    _remove(former)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                _flush(Path(folder, name))
            _flush(Path(folder))
    else:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: OSError) -> str:
    """One line; h5py gives no strerror but names the system's words somewhere in its message."""
    if error.strerror:
        return error.strerror
    text = str(error)
    _, found, rest = text.partition("error message = '")
    return rest.split("'")[0] if found else " ".join(text.split())[:200]
