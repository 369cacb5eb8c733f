"""undo: return a file to its bytes before the injection, from the manifest alone."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from flipper.checkpoints import Checkpoint, open_checkpoint
from flipper.checkpoints.elements import byte_masks, combine
from flipper.errors import FlipperError, MismatchError, OutputError, UsageError
from flipper.injection.changes import Masks
from flipper.injection.manifest import Manifest, Patch, read_manifest, remove_manifest
from flipper.injection.moved import is_back, put_together
from flipper.injection.patching import patch, write_runs
from flipper.injection.recording import stacked_manifests
from flipper.injection.scratch import clear_scratch
from flipper.injection.table import StruckTensor


def undo(path: str | os.PathLike[str], manifest: str | os.PathLike[str] | None = None) -> Manifest:
    """Restore the old bytes of FILE, wherever it stands between its bytes before and after the injection.

    manifest: None takes the newest one beside the file. It is removed afterwards, so that the next undo takes back
    the injection before it; but kept when it is the record of another file, of which FILE is a copy.
    Raises MismatchError when a byte is neither the old nor the new one (nothing is altered then), UsageError when there
    is no manifest, FlipperError, OutputError.
    """
    target = Path(path)
    if target.is_file():
        clear_scratch(target)
    place = Path(manifest) if manifest is not None else newest_manifest(target)
    record = read_manifest(place)
    moved = _moved(target, record)
    plain = _patches_by_file(record, without=record.sizes if record.rewritten else ())
    _check_patches(target, record, plain)
    elements = _element_masks(target, record)
    try:
        for name, patches in plain.items():
            write_runs(_file(target, name), [(one.offset, one.before) for one in patches], record.sizes.get(name))
        for file, patches in moved.items():
            put_together(file, patches)
        for path, masks in elements.items():
            patch(path, *masks, sync=True)
    except OSError as error:
        raise OutputError(f"{target}: {error.strerror or error}; the same undo goes on from here") from error
    if not _is_of_another(record, place, target):
        remove_manifest(place)
    return record


def _is_of_another(record: Manifest, place: Path, target: Path) -> bool:
    """Whether the manifest is still that of another file, which may stand as it was struck."""
    if any(place.samefile(mine) for mine in stacked_manifests(target)):
        return False
    named = record.output.get("path")
    if not isinstance(named, str) or "\0" in named:
        return False
    outputs = [path for path in (Path(named), place.parent / named) if path.exists()]
    return bool(outputs) and not any(path.samefile(target) for path in outputs)


def newest_manifest(path: Path) -> Path:
    """The manifest of the last injection, beside the file; raises UsageError when there is none."""
    found = stacked_manifests(path)
    if not found:
        raise UsageError(f"there is no {path.name}.flipper.json beside {path}; name the manifest by --manifest")
    return found[-1]


def _file(target: Path, name: str) -> Path:
    """A file of a directory checkpoint; the file itself for a single one."""
    return target / name if target.is_dir() else target


def _patches_by_file(record: Manifest, without: Collection[str] = ()) -> dict[str, list[Patch]]:
    """The patches of each file that has some or was rewritten."""
    names = sorted(({one.file for one in record.patches} | set(record.sizes)) - set(without))
    return {name: [one for one in record.patches if one.file == name] for name in names}


def _moved(target: Path, record: Manifest) -> dict[Path, list[Patch]]:
    """The patches of files whose entries moved, without those that are as before the injection already."""
    if not record.rewritten:
        return {}
    patches = {name: [one for one in record.patches if one.file == name] for name in record.sizes}
    if not patches or not all(patches.values()):
        raise FlipperError(f"{target}: too much of its archive was packed anew to be recorded; take the source again")
    paths = {name: _file(target, name) for name in patches}
    return {paths[name]: mine for name, mine in patches.items() if not is_back(paths[name], mine, record.sizes[name])}


def _check_patches(target: Path, record: Manifest, plain: dict[str, list[Patch]]) -> None:
    for name, patches in plain.items():
        _check_size(_file(target, name), record.sizes.get(name), patches)
    for one in (one for patches in plain.values() for one in patches):
        path = _file(target, one.file)
        try:
            with open(path, "rb") as file:
                file.seek(one.offset)
                seen = file.read(max(len(one.before), len(one.after)))
        except OSError as error:
            raise MismatchError(f"{path}: {error.strerror}") from error
        if not _between(seen, one):
            what = f"bytes at {one.offset} are neither those before nor those after the injection"
            raise MismatchError(f"{path}: {what}; nothing was undone")


def _check_size(path: Path, before: int | None, patches: list[Patch]) -> None:
    """A file that was cut or went on growing meanwhile would not be what it was, whatever the patches put back.

    before: its size before the injection; None when that didn't change.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise MismatchError(f"{path}: {error.strerror}") from error
    old = size if before is None else before
    new = old + sum(len(one.after) - len(one.before) for one in patches)
    if outside := [one.offset for one in patches if not _fits(one, old, new)]:
        raise MismatchError(f"{path}: the patch at {outside[0]} lies outside the file; nothing was undone")
    if not min(old, new) <= size <= max(old, new):
        what = f"it has {size} bytes, {old} before the injection and {new} after it"
        raise MismatchError(f"{path}: {what}; nothing was undone")


def _fits(one: Patch, old: int, new: int) -> bool:
    """Whether a patch lies inside the file, or is one of those behind its end by which it grew or shrank."""
    shorter, longer = sorted((len(one.before), len(one.after)))
    if shorter == longer:
        return one.offset + longer <= min(old, new)
    grows = len(one.after) > len(one.before)
    at_end = one.offset + shorter == min(old, new) or (shorter == 0 and one.offset > min(old, new))
    return grows == (new > old) and at_end and one.offset + longer <= max(old, new)


def _between(seen: bytes, one: Patch) -> bool:
    """Whether each byte is the old or the new one; where the file grew, bytes may not be there yet, or still zeros."""
    old = np.frombuffer(one.before, np.uint8)
    new = np.frombuffer(one.after, np.uint8)
    common = min(len(old), len(new), len(seen))
    here = np.frombuffer(seen, np.uint8)
    if not np.all((here[:common] == old[:common]) | (here[:common] == new[:common])):
        return False
    rest, longer = here[common:], (new if len(new) > len(old) else old)[common : len(here)]
    return bool(np.all((rest == longer) | (rest == 0)))


def _element_masks(target: Path, record: Manifest) -> dict[Path, Masks]:
    """What to XOR so that struck elements are as before; files that were rewritten have all their bytes in patches."""
    rewritten = [number for number, file in enumerate(record.table.files) if "" in record.sizes or file in record.sizes]
    placed = (record.table.offset >= 0) | record.rewritten  # where entries moved, no offset is recorded at all
    if not np.any(placed & ~np.isin(record.table.file, rewritten)):
        return {}  # a file that is half rewritten may not even open
    pieces: dict[str, list[Masks]] = {}
    with open_checkpoint(target) as checkpoint:
        for tensor, rows in record.table.slices():
            _collect(checkpoint, tensor, record, rows, pieces)
        paths = {file: checkpoint.sources[file].path for file in pieces}
    kept = {file: parts for file, parts in pieces.items() if file not in record.sizes}
    return {paths[f]: combine(*(np.concatenate(c) for c in zip(*parts, strict=True))) for f, parts in kept.items()}


def _collect(
    checkpoint: Checkpoint, struck: StruckTensor, record: Manifest, rows: slice, pieces: dict[str, list[Masks]]
) -> None:
    tensor = checkpoint.tensor(struck.name)
    table = record.table
    if (tensor.dtype, tensor.shape) != (struck.dtype, struck.shape):
        raise MismatchError(f"{struck.name} is not of the dtype and shape that the manifest names; nothing was undone")
    if not tensor.supported or not tensor.place.patchable:
        return
    flat, before, after = table.flat[rows], table.before[rows], table.after[rows]
    now = checkpoint.read_bits(tensor, flat)
    xor, change = now ^ before, before ^ after
    if np.any(xor & ~change):
        where = int(flat[np.flatnonzero(xor & ~change)[0]])
        raise MismatchError(f"{struck.name}, element {where} is neither as before nor as after; nothing was undone")
    for part in tensor.place.locate(tensor.dims, tensor.layout, flat):
        masks = byte_masks(part.offsets, xor[part.where], tensor.layout, part.order, part.shifts)
        pieces.setdefault(part.file, []).append(masks)
