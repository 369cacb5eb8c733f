"""Locks: one writer at a time, by a file that names its host and process; that of a process that is gone is taken over.

A file and no lock of the system's, since these fail on the network filesystems where cluster folders lie.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from flipper.campaigns.owners import Owner
from flipper.errors import OutputError

_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def take(lock: Path) -> None:
    """Make the lock, whole at once; OutputError says who has it, or why it can't be made."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        partial = lock.with_name(f"{lock.name}.{os.urandom(6).hex()}")
        try:
            partial.write_text(Owner.here().text(), "utf-8")
            while not _made(lock, partial):
                if _replaced(lock, partial):
                    break
        finally:
            partial.unlink(missing_ok=True)
        for leftover in lock.parent.glob(f"{lock.name}.*"):
            if (owner := Owner.read(leftover)) and owner.gone:
                leftover.unlink(missing_ok=True)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"can't write {lock}: {error.strerror or error}") from error


def release(lock: Path) -> None:
    """Remove the lock, if it is this process's."""
    if Owner.read(lock) == Owner.here():
        lock.unlink(missing_ok=True)


def _made(lock: Path, partial: Path) -> bool:
    """Whether the lock is ours now; not when there is one."""
    try:
        os.link(partial, lock)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            with lock.open("x", encoding="utf-8") as file:
                file.write(partial.read_text("utf-8"))
        except FileExistsError:
            return False
    return True


def _replaced(lock: Path, partial: Path) -> bool:
    """Whether we have put ours in the place of one whose process is gone; not when there is none any more.

    Under a lock of its own: of two that find the same process gone, the second would remove the lock of the first.
    """
    if _gone(lock) is None:
        return False
    taking_over = lock.with_name(f"{lock.name}-taking-over")
    take(taking_over)
    try:
        if _gone(lock) is None:
            return False
        os.replace(partial, lock)
    finally:
        release(taking_over)
    return True


def _gone(lock: Path) -> Owner | None:
    """The process, gone, that has the lock; None when there is no lock. OutputError says who has it still."""
    holder = Owner.read(lock)
    if os.path.lexists(lock) and not (holder and holder.gone):
        who = holder or "another process"
        raise OutputError(f"{who} writes to this campaign; wait for it, or remove {lock} if it is gone")
    return holder
