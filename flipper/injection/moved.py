"""Moved: what to record of a file whose parts moved when it was written anew, and putting it together again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    with Source(before) as old, Source(after) as new:
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


def put_together(path: Path, patches: Sequence[Patch], size: int) -> None:
    """Give a file whose parts moved the bytes it had before, `size` of them: whole under its name, or not at all.

    patches: those of the file, from check_moved.
    """
    with Source(path) as altered, atomic_output(path, force=True, sync=True) as temporary:
        shutil.copymode(path, temporary)
        with open(temporary, "wb") as output:
            at = 0
            for patch in patches:
                _copy(altered, at, patch.offset, output.fileno())
                at = patch.offset + len(patch.after)
