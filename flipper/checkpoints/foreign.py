"""Foreign: what a file is that flipper doesn't read, told from its content, for a message that helps."""

from __future__ import annotations

from typing import Final

from flipper.checkpoints.archives import mentions
from flipper.checkpoints.source import Source

_UNREAD = "a format that flipper doesn't read"

_BEGINNINGS: Final = (
    (0, b"version https://git-lfs", "a pointer of Git LFS, not the file itself: git lfs pull fetches that"),
    (0, b"\x93NUMPY", f"a NumPy array (.npy), {_UNREAD}"),
    (0, b"GGUF", f"a GGUF model, {_UNREAD}"),
    (257, b"ustar", f"a tar archive, {_UNREAD}; if it holds a checkpoint, unpack it"),
    (0, b"\x1f\x8b", "compressed by gzip; unpack it"),
    (0, b"BZh", "compressed by bzip2; unpack it"),
    (0, b"\xfd7zXZ\0", "compressed by xz; unpack it"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it"),
)
"""Where a mark stands, the mark, and what a file that has it is."""

_ENTRIES: Final = (
    (b".npy", f"a NumPy archive (.npz), {_UNREAD}"),
    (b"archive_format", f"a program of torch.export (.pt2), {_UNREAD}: save its state_dict() by torch.save"),
    (b"serialized_exported_program.json", f"a program of torch.export (.pt2), {_UNREAD}: save its state_dict()"),
    (b"", "a zip archive without a data.pkl, so none of PyTorch's"),
)
"""Part of the name of an entry of a zip archive, and what the archive is."""


def what(source: Source) -> str | None:
    """What the file is, and what to do; None where its content doesn't say."""
    head = source.head(512)
    for offset, mark, meaning in _BEGINNINGS:
        if head.startswith(mark, offset):
            return meaning
    if not head.startswith((b"PK\3\4", b"PK\5\6")):
        return "a pickle that torch.save didn't write" if _is_pickle(source, head) else None
    return next(meaning for name, meaning in _ENTRIES if mentions(source, name))


def _is_pickle(source: Source, head: bytes) -> bool:
    """Whether it begins with a protocol's number and ends with the stop of a pickle."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and source.read(source.size - 1, 1) == b"."
