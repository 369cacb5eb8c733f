"""Moved: what to record of a file whose parts moved when it was written anew, and putting it together again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from flipper.checkpoints.checkpoint import Region
from flipper.checkpoints.output import PIECE, atomic_output
from flipper.checkpoints.source import Source
from flipper.errors import MismatchError
from flipper.injection.differences import BLOCK, runs
from flipper.injection.manifest import Patch

RECORDED = 64 << 20
"""Bytes of one file, before and after, that are recorded at most: hex makes two of each, and all are in memory."""


def moved_patches(file: str, before: Path, after: Path, regions: Sequence[Region]) -> tuple[Patch, ...]:
    """What turns `after` into `before` again: patches at places of `after`, whose two sides may differ in length.

    regions: of both files from end to end, in order. Nothing comes back where too much would have to be recorded.
    """
    patches, recorded = [], sum(one.size + one.new_size for one in regions if one.size != one.new_size)
    if recorded > RECORDED:
        return ()
    with closing(Source(before)) as old, closing(Source(after)) as new:
        for region in regions:
            for offset, left, right in _differing(old, new, region):
                patches.append(Patch(file, offset, left, right))
                recorded += len(left) + len(right) if region.size == region.new_size else 0
                if recorded > RECORDED:
                    return ()
    return tuple(patches)


def _differing(old: Source, new: Source, region: Region) -> Iterator[tuple[int, bytes, bytes]]:
    if region.size != region.new_size:
        yield region.new_start, old.read(region.start, region.size), new.read(region.new_start, region.new_size)
        return
    for first in range(0, region.size, BLOCK):
        count = min(BLOCK, region.size - first)
        left, right = old.read(region.start + first, count), new.read(region.new_start + first, count)
        if left != right:
            yield from runs(region.new_start + first, left, right)


def is_back(path: Path, patches: Sequence[Patch], size: int) -> bool:
    """Whether a file has its bytes before the injection already, `size` of them, and not those after it.

    patches: those of the file, in order. Raises MismatchError when it has neither.
    """
    new_size = size + sum(len(one.after) - len(one.before) for one in patches)
    former, at = [], 0
    for one in patches:
        former.append((one.offset + at, one.before))
        at += len(one.before) - len(one.after)
    try:
        with open(path, "rb") as file:
            seen = file.seek(0, 2)
            if seen == new_size and _holds(file, [(one.offset, one.after) for one in patches]):
                return False
            if seen == size and _holds(file, former):
                return True
    except OSError as error:
        raise MismatchError(f"{path}: {error.strerror}; nothing was undone") from error
    what = f"its {seen} bytes are neither those before the injection ({size} of them) nor those after it ({new_size})"
    raise MismatchError(f"{path}: {what}; nothing was undone")


def _holds(file: BinaryIO, pieces: Sequence[tuple[int, bytes]]) -> bool:
    """Whether all these bytes stand at their places, which ascend."""
    end = 0
    for offset, data in pieces:
        if offset < end:
            return False
        end = offset + len(data)
        file.seek(offset)
        if file.read(len(data)) != data:
            return False
    return True


def put_together(path: Path, patches: Sequence[Patch]) -> None:
    """Give a file for which `is_back` is false its bytes before the injection: all at once, on the disk.

    One that a link leads to is meant itself; a read-only one raises PermissionError.
    """
    path = path.resolve()
    with open(path, "r+b") as altered, atomic_output(path, force=True, sync=True) as temporary:
        shutil.copymode(path, temporary)
        with open(temporary, "r+b") as output:
            for one in patches:
                _copy(altered, output, one.offset - altered.tell())
                output.write(one.before)
                altered.seek(len(one.after), 1)
            shutil.copyfileobj(altered, output, PIECE)


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        count -= target.write(source.read(min(PIECE, count)))
