"""Copying a file as the kernel does it best: share its blocks, else copy them without passing through us."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flipper.checkpoints.output import PIECE

FICLONE = 0x40049409
"""Linux: make a file share all blocks of another one (btrfs, XFS, bcachefs)."""

CHUNK = 1 << 28
"""Bytes that one call may move: the kernel's limit is some 2 GiB, but it counts for progress only what is done."""

Way = Callable[[int, int, int, int], int]
"""Copies some of the bytes [offset, offset + count) from one descriptor to another: reader, writer, offset, count.

Returns how many bytes it moved, from the first on.
"""

_UNSUPPORTED = {
    errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ETXTBSY, errno.ENOTTY,
    errno.EBADF, errno.ENOTSOCK,
}  # fmt: skip
"""Errors that mean "not between these two files", after which the next way is tried."""


def copy(source: Path, target: Path, ways: Sequence[Way] = ()) -> bool:
    """Copy the content and the mode bits of `source` to `target`, which exists; returns whether blocks are shared.

    ways: tried one after the other where blocks can't be shared; by default those of the kernel, then our own.
    Raises OSError (disk full, ...); `target` is then incomplete and its maker removes it.
    """
    with open(source, "rb", buffering=0) as reader, open(target, "r+b", buffering=0) as writer:
        mode = os.fstat(reader.fileno()).st_mode & 0o777
        os.fchmod(writer.fileno(), mode)
        if clone(reader.fileno(), writer.fileno()):
            return True
        size = os.fstat(reader.fileno()).st_size
        done = 0
        for way in ways or (_copy_file_range, _sendfile, _read_write):
            done = _advance(way, reader.fileno(), writer.fileno(), done, size)
            if done == size:
                break
    if done < size:
        raise OSError(errno.EIO, f"the source ended at byte {done} of {size} while it was copied")
    return False


def clone(reader: int, writer: int) -> bool:
    """Let the file `writer` share all blocks of `reader`; False where the filesystem can't."""
    try:
        fcntl.ioctl(writer, FICLONE, reader)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` hold what `source` holds, unchanged: shared blocks, else a hard link, else a copy."""
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        if clone(reader.fileno(), writer.fileno()):
            os.fchmod(writer.fileno(), os.fstat(reader.fileno()).st_mode & 0o777)
            return
    target.unlink()
    try:
        os.link(source, target)
    except OSError:
        target.touch()
        copy(source, target)


def _advance(way: Way, reader: int, writer: int, done: int, size: int) -> int:
    """Copy on from `done` in one way until the end, or until it moves no more bytes or turns out not to be possible."""
    while done < size:
        try:
            moved = way(reader, writer, done, min(size - done, CHUNK))
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return done
            raise
        if moved == 0:  # some filesystems say so instead of an error, and so does a file that was cut meanwhile
            return done
        done += moved
    return done


def _copy_file_range(reader: int, writer: int, offset: int, count: int) -> int:
    if not hasattr(os, "copy_file_range"):  # it is Linux's own
        return 0
    return os.copy_file_range(reader, writer, count, offset, offset)


def _sendfile(reader: int, writer: int, offset: int, count: int) -> int:
    os.lseek(writer, offset, os.SEEK_SET)
    return os.sendfile(writer, reader, offset, count)


def _read_write(reader: int, writer: int, offset: int, count: int) -> int:
    data = os.pread(reader, min(count, PIECE), offset)
    return os.pwrite(writer, data, offset) if data else 0
