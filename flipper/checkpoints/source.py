"""Source: random read access to a file, or to a window of one."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock

from flipper.errors import CheckpointError

_OPENING = Lock()
"""Held while a file is opened: two threads may read one source."""


class Source:
    """Bytes [start, start + size) of a file, read by position; the file is opened at the first read.

    size: None for all that follows `start`.
    Raises CheckpointError: unreadable, or truncated when fewer bytes are there than were asked for.
    """

    def __init__(self, path: Path, start: int = 0, size: int | None = None) -> None:
        self.path = path
        self.start = start
        self._descriptor: int | None = None
        try:
            self.size = path.stat().st_size - start if size is None else size
        except OSError as error:
            raise CheckpointError("unreadable", f"{path}: {error.strerror}") from error

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset`; raises CheckpointError("truncated") if they are not all there."""
        if offset < 0 or count < 0 or offset + count > self.size:
            seen = f"bytes {offset} to {offset + count} are wanted, the file holds {self.size}"
            raise CheckpointError("truncated", f"{self.path}: {seen}")
        whole = self._pread(min(count, 1 << 30), self.start + offset)
        if len(whole) == count:  # nearly always
            return whole
        rest = bytearray(count - len(whole))
        self.read_into(offset + len(whole), memoryview(rest))
        return whole + bytes(rest)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a writable buffer with the bytes from `offset`, as `read` but without fresh memory; errors as there."""
        if offset < 0 or offset + len(buffer) > self.size:
            seen = f"bytes {offset} to {offset + len(buffer)} are wanted, the file holds {self.size}"
            raise CheckpointError("truncated", f"{self.path}: {seen}")
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._opened(), [buffer[done:]], self.start + offset + done)
            except OSError as error:
                raise CheckpointError("unreadable", f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError("truncated", f"{self.path}: the file ended while it was read")
            done += count

    def head(self, count: int) -> bytes:
        """Up to `count` bytes from the beginning."""
        return self.read(0, min(count, self.size))

    def window(self, start: int, size: int) -> Source:
        """The part [start, start + size) of this source as one of its own."""
        if start < 0 or size < 0 or start + size > self.size:
            raise CheckpointError("truncated", f"{self.path}: bytes {start} to {start + size} are not in the file")
        return Source(self.path, self.start + start, size)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _pread(self, count: int, position: int) -> bytes:
        try:
            return os.pread(self._opened(), count, position)
        except OSError as error:
            raise CheckpointError("unreadable", f"{self.path}: {error.strerror}") from error

    def _opened(self) -> int:
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        return self._descriptor

    def _open(self) -> None:
        with _OPENING:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        self.close()
