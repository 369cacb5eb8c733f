"""verify: does a container hold together, were the recorded faults made, and was nothing else changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from flipper.checkpoints import Checkpoint, open_checkpoint
from flipper.errors import CheckpointError, MismatchError, UsageError
from flipper.injection.changes import Changes, Masks, changes_of
from flipper.injection.differences import differing_bytes, patches_between
from flipper.injection.manifest import Manifest, read_manifest, sha256_of, table_file
from flipper.injection.patching import copy_patched

SHOWN = 20
"""Problems told one by one."""

NO_MASKS: Final[Masks] = (np.zeros(0, np.int64), np.zeros(0, np.uint8))
"""Of files that must be equal."""


@dataclass(frozen=True)
class Verdict:
    """problems: what doesn't hold, () if all does. complete: whether it was checked that nothing else was changed.
    faults: recorded elements that were checked; None without a manifest."""

    path: str
    format: str
    problems: tuple[str, ...]
    complete: bool
    faults: int | None

    def record(self) -> dict[str, Any]:
        """As `flipper verify` prints it."""
        return {
            "path": self.path,
            "format": self.format,
            "ok": not self.problems,
            "complete": self.complete,
            "faults": self.faults,
            "problems": list(self.problems[:SHOWN]),
            "problems_found": len(self.problems),
        }


def verify(
    path: str | os.PathLike[str],
    manifest: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Check FILE: its container; with a manifest that its faults were made; with the source, that nothing else was.

    The digest that a manifest may hold serves in place of the source. Raises CheckpointError, FlipperError, UsageError.
    """
    target = Path(path)
    if source is not None and manifest is None:
        raise UsageError("--source goes with --manifest, which says what may differ from it")
    with open_checkpoint(target) as checkpoint:
        if manifest is None:
            return Verdict(str(path), checkpoint.format, tuple(checkpoint.problems()), False, None)
        record = read_manifest(Path(manifest))
        # Checksums that were left stale on purpose are no problem.
        problems = [] if record.keep_checksums else list(checkpoint.problems())
        problems += _missing_faults(checkpoint, record, source is not None)
        digest = record.output.get("sha256")
        if digest is not None and sha256_of(target) != digest:
            problems.append(f"{path}: its sha256 is not the one recorded after the injection")
        if source is not None:
            with open_checkpoint(source) as original:
                problems += _other_changes(original, checkpoint, record)
        complete = digest is not None or source is not None
        return Verdict(str(path), checkpoint.format, tuple(problems), complete, len(record.table))


def _missing_faults(checkpoint: Checkpoint, record: Manifest, compared: bool) -> Iterator[str]:
    """Recorded elements that hold something else. compared: whether all bytes will be held against the source's."""
    table = record.table
    for struck, rows in table.slices():
        try:
            tensor = checkpoint.tensor(struck.name)
        except UsageError:
            yield f"{struck.name}: the manifest strikes it, and it is not there"
            continue
        if not tensor.supported or (tensor.dtype, tensor.shape) != (struck.dtype, struck.shape):
            yield f"{struck.name}: it is not of the dtype and shape that the manifest names"
            continue
        try:
            now = checkpoint.read_bits(tensor, table.flat[rows])
        except CheckpointError as error:
            if not (record.keep_checksums and error.reason == "checksum"):
                raise
            if not compared:
                yield f"{struck.name}: HDF5 refuses it for the stale checksum; --source compares the bytes instead"
            continue
        for row in np.flatnonzero(now != table.after[rows])[:SHOWN].tolist():
            seen, wanted = int(now[row]), int(table.after[rows][row])
            yield f"{struck.name}, element {int(table.flat[rows][row])}: 0x{seen:x} is there, 0x{wanted:x} was written"


def _other_changes(original: Checkpoint, checkpoint: Checkpoint, record: Manifest) -> Iterator[str]:
    """What differs from the source beyond what the recorded faults do to it."""
    if original.sources.keys() != checkpoint.sources.keys() or original.format != checkpoint.format:
        yield f"{original.path} is {original.format}, {checkpoint.path} is {checkpoint.format}: not its source"
        return
    try:
        changes = changes_of(original, record.table.plan(), record.keep_checksums)
    except (MismatchError, UsageError) as error:
        yield f"{original.path} is not the source: {error}"
        return
    yield from _other_files(original, checkpoint, record)
    for file, source in original.sources.items():
        path = checkpoint.sources[file].path
        if file in changes.edits and record.rewritten:
            yield from _other_rewriting(original, changes, file, path, record.keep_checksums)
        elif file in record.sizes:
            expected = tuple(patch for patch in record.patches if patch.file == file)
            if patches_between(file, source.path, path) != expected:
                yield f"{path} differs from the source in other bytes than the manifest's patches"
        else:
            stray = _stray_byte(source.path, path, changes.file_masks(file))
            if stray is not None:
                yield f"{path}: byte {stray} is not what the source and the recorded faults make it"


def _stray_byte(source: Path, path: Path, masks: Masks) -> int | None:
    """The first byte that is not the source's byte XORed with its mask; sizes that differ count."""
    if source.stat().st_size != path.stat().st_size:
        return min(source.stat().st_size, path.stat().st_size)
    for begin, end, places, xor in differing_bytes(source, path):
        first, last = np.searchsorted(masks[0], [begin, end])
        offsets, wanted = masks[0][first:last], masks[1][first:last]
        if not np.array_equal(places, offsets):
            odd = np.setxor1d(places, offsets, assume_unique=True)
            return int(odd[0])
        if not np.array_equal(xor, wanted):
            return int(offsets[np.flatnonzero(xor != wanted)[0]])
    return None


def _other_files(original: Checkpoint, checkpoint: Checkpoint, record: Manifest) -> Iterator[str]:
    """The files beside the data of a directory (index, metadata, configuration) are those of the source, and no more.

    A record inside the directory is none of them.
    """
    if not original.is_directory:
        return
    source, copied = _files(original.path), _files(checkpoint.path)
    for name in sorted(source - original.sources.keys()):
        if name not in copied:
            yield f"{checkpoint.path / name} is not there; the source has it"
        elif _stray_byte(original.path / name, checkpoint.path / name, NO_MASKS) is not None:
            yield f"{checkpoint.path / name} is not as in the source"
    for name in sorted(copied - source):
        path = checkpoint.path / name
        if record.path is None or not any(_same(path, mine) for mine in (record.path, table_file(record.path))):
            yield f"{path} is not in the source"


def _files(folder: Path) -> set[str]:
    """The files below a directory, as a copy holds them: links are followed, but for those that lead round."""
    found: set[str] = set()
    for here, inner, names in os.walk(folder, followlinks=True):
        path = Path(here)
        relative = path.relative_to(folder)
        above = [path, *path.parents[: len(relative.parts)]]
        inner[:] = [name for name in inner if not any(os.path.samefile(path / name, one) for one in above)]
        found.update((relative / name).as_posix() for name in names if (path / name).is_file())
    return found


def _same(path: Path, other: Path) -> bool:
    return other.exists() and os.path.samefile(path, other)


def _other_rewriting(
    original: Checkpoint, changes: Changes, file: str, path: Path, keep_checksums: bool
) -> Iterator[str]:
    """An archive that was written anew is compared with one that is written anew here."""
    with TemporaryDirectory(prefix="flipper-") as folder:
        target = Path(folder, "again")
        target.touch()
        copy_patched(original.sources[file].path, target, *changes.file_masks(file))
        target.chmod(0o600)
        original.rewrite(target, file, changes.edits[file], keep_checksums)
        stray = _stray_byte(target, path, NO_MASKS)
    if stray is not None:
        cause = "it was altered, or packed by another version of zlib (a digest, --sha256, tells these apart)"
        yield f"{path}: byte {stray} is not what rewriting the source with the recorded faults gives: {cause}"


def explain(verdict: Verdict) -> str:
    """One line for people."""
    if verdict.problems:
        return f"{verdict.path}: problems: {len(verdict.problems)}, the first: {verdict.problems[0]}"
    checked = "nothing else was changed" if verdict.complete else "whether anything else was changed is not known"
    return f"{verdict.path}: sound" + ("" if verdict.faults is None else f"; its faults were made; {checked}")
