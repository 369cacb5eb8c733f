"""Inflate: a deflated archive entry as a source that is read forward, in bounded memory."""

from __future__ import annotations

import zlib

from flipper.checkpoints.archives import DEFLATED, Archive, Entry, broken
from flipper.checkpoints.source import Source
from flipper.errors import CheckpointError

PIECE = 1 << 18
"""Compressed bytes that are read together."""

RATIO = 1040
"""No deflated stream grows by more when it is inflated."""


class Inflated(Source):
    """The content of a deflated entry; reading backwards begins anew, a few bytes excepted."""

    def __init__(self, source: Source, start: int, packed: int, size: int) -> None:
        super().__init__(source.path, 0, size)
        self._packed = source.window(start, packed)
        self._rewind()

    def _rewind(self) -> None:
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._fed = 0
        self._kept = b""
        self._first = 0

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes of the content from `offset`; raises CheckpointError("header") where it is damaged."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError("truncated", f"{self.path}: bytes {offset} to {offset + count} of {self.size} wanted")
        if offset < self._first:
            self._rewind()
        while self._first + len(self._kept) < offset:
            self._kept, self._first = b"", self._first + len(self._kept)
            self._kept = self._next(PIECE)
        pieces = [self._kept[offset - self._first :]]
        held = len(pieces[0])
        while held < count:
            pieces.append(self._next(max(count - held, 64)))
            held += len(pieces[-1])
        data = b"".join(pieces)
        self._first, self._kept = (offset, data) if count <= 64 else (offset + count - 64, data[count - 64 :])
        return data[:count]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a writable buffer with the bytes from `offset`; errors as in `read`."""
        buffer[:] = self.read(offset, len(buffer))

    def _next(self, limit: int) -> bytes:
        """Some more bytes, at least one and at most `limit`."""
        while True:
            pending = self._inflater.unconsumed_tail
            if not pending:
                count = min(PIECE, self._packed.size - self._fed)
                pending = self._packed.read(self._fed, count)
                self._fed += count
            try:
                data = self._inflater.decompress(pending, limit)
            except zlib.error as error:
                raise CheckpointError("header", f"{self.path}: a deflated entry is damaged ({error})") from error
            if data:
                return data
            if self._inflater.eof or (not self._inflater.unconsumed_tail and self._fed == self._packed.size):
                raise CheckpointError("header", f"{self.path}: a deflated entry ends early")


def inflated(archive: Archive, entry: Entry) -> Inflated:
    """The content of a deflated entry."""
    if entry.method != DEFLATED:
        message = f"{entry.name[:80]!r} is compressed by method {entry.method}; flipper knows stored and deflated"
        raise CheckpointError("unsupported-storage", f"{archive.source.path}: {message}")
    if entry.size > RATIO * entry.packed + PIECE:
        message = f"{entry.name[:80]!r} can't inflate from {entry.packed} to {entry.size} bytes"
        raise broken(archive.source, message)
    return Inflated(archive.source, archive.data_start(entry), entry.packed, entry.size)
