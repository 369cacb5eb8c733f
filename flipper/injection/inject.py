"""inject: strike a checkpoint by a plan, in an altered copy or in place, and record it in a manifest."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from flipper.checkpoints import Checkpoint, open_checkpoint
from flipper.checkpoints.output import atomic_output, writing
from flipper.errors import UsageError
from flipper.faults.plan import FaultPlan
from flipper.injection.changes import Changes, changes_of
from flipper.injection.collisions import refuse_collisions
from flipper.injection.copying import copy, link_or_copy
from flipper.injection.differences import patches_between
from flipper.injection.in_place import alter_in_place
from flipper.injection.manifest import Manifest, ManifestFiles, manifest_output, remove_manifest
from flipper.injection.moved import moved_patches
from flipper.injection.patching import copy_patched
from flipper.injection.recording import (
    Record,
    Rewritten,
    checksum_patches,
    free_place,
    manifest_of,
    manifest_path,
    recorded_table,
    refuse_overlap,
    stacked_manifests,
    with_output,
)
from flipper.injection.table import FaultTable


def inject(
    source: str | os.PathLike[str] | Checkpoint,
    output: str | os.PathLike[str] | None,
    plan: FaultPlan,
    *,
    force: bool = False,
    sync: bool = False,
    record: Record | None = None,
) -> Manifest:
    """Strike `source` by `plan`: write the altered copy `output`, or alter it in place when `output` is None.

    force: overwrite what is there; in place, alter a file that is reached by a link or under several names.
    sync: flush to disk (always so in place). record: see Record.
    Returns the manifest, which also lies at OUT.flipper.json (or where `record` says).
    Raises UsageError, MismatchError, OutputError, CheckpointError; then nothing was left behind or altered.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    note = record or Record()
    changes = changes_of(checkpoint, plan, note.keep_checksums)
    refuse_collisions(changes.struck)
    if output is None:
        return alter_in_place(checkpoint, plan, changes, force, note)
    return _copy(checkpoint, Path(output), plan, changes, force, sync, note)


def _copy(
    checkpoint: Checkpoint, output: Path, plan: FaultPlan, changes: Changes, force: bool, sync: bool, note: Record
) -> Manifest:
    _refuse_same(checkpoint, output)
    place = free_place(note.path or manifest_path(output), force)
    refuse_overlap(checkpoint, place, output)
    recorded = False
    try:
        with atomic_output(output, force, directory=checkpoint.is_directory, sync=sync) as temporary:
            with manifest_output(place, len(changes.columns.flat), force, sync) as files:
                with writing(output):
                    rewritten, table, faults = _write_both(checkpoint, changes, temporary, output, files, note)
                manifest = manifest_of(checkpoint, plan, table, output, note, rewritten)
                manifest = with_output(manifest, checkpoint, temporary, note)
                files.write(manifest, faults)
            recorded = True
    except BaseException:
        if recorded:
            remove_manifest(place)
        raise
    for stale in stacked_manifests(output):  # those of the file that stood here before
        if not stale.samefile(place):
            remove_manifest(stale)
    return replace(manifest, path=place)


def _write_both(
    checkpoint: Checkpoint, changes: Changes, temporary: Path, output: Path, files: ManifestFiles, note: Record
) -> tuple[Rewritten, FaultTable, Any]:
    """Write the copy, and the table of the faults if it is long; returns what goes into the manifest of both."""
    if files.table is None:
        table, faults = _write_table(checkpoint, changes, output, files)
        return _write_copy(checkpoint, changes, temporary, note.keep_checksums), table, faults
    from concurrent.futures import ThreadPoolExecutor  # which takes 10 ms to import

    # The table of 1e7 faults in 2 GiB takes 0.9 s, as long as the copy: each has a core of its own.
    with ThreadPoolExecutor(1) as thread:
        recording = thread.submit(_write_table, checkpoint, changes, output, files)
        try:
            rewritten = _write_copy(checkpoint, changes, temporary, note.keep_checksums)
        except OSError:
            recording.result()  # what is wrong with the source goes before what is wrong with the copy
            raise
        return rewritten, *recording.result()


def _write_table(
    checkpoint: Checkpoint, changes: Changes, output: Path, files: ManifestFiles
) -> tuple[FaultTable, Any]:
    table = recorded_table(checkpoint, changes, output, files.place)
    return table, files.write_table(table)


def _write_copy(checkpoint: Checkpoint, changes: Changes, target: Path, keep_checksums: bool) -> Rewritten:
    if checkpoint.is_directory:
        _copy_unstruck(checkpoint, target, set(changes.struck_files))
    rewritten = Rewritten()
    for file in changes.struck_files or sorted({""} & set(checkpoint.sources)):
        altered = _write_altered(checkpoint, changes, file, target, keep_checksums)
        rewritten = Rewritten(
            rewritten.patches + altered.patches, rewritten.sizes + altered.sizes, rewritten.moved or altered.moved
        )
    return rewritten


def _copy_unstruck(checkpoint: Checkpoint, target: Path, struck: set[str]) -> None:
    """All files of a directory but the struck ones; links become what they lead to.

    Shards share blocks or are hard links where the filesystem can; the small files beside them are real copies, since
    people edit these.
    """
    for folder, inner, names in os.walk(checkpoint.path, followlinks=True):
        relative = Path(folder).relative_to(checkpoint.path)
        (target / relative).mkdir(exist_ok=True)
        if _is_loop(Path(folder), len(relative.parts)):
            inner.clear()
            continue
        for name in names:
            file = (relative / name).as_posix()
            original, copied = (Path(folder) / name).resolve(), target / file
            if file in struck or not original.is_file():  # sockets and pipes, links that lead nowhere
                continue
            if file in checkpoint.sources:
                link_or_copy(original, copied)
            else:
                copied.touch()
                copy(original, copied)


def _is_loop(folder: Path, depth: int) -> bool:
    """Whether a folder is, by a link, one of the `depth` folders that it lies in."""
    return any(os.path.samefile(folder, above) for above in folder.parents[:depth])


def _write_altered(
    checkpoint: Checkpoint, changes: Changes, file: str, folder: Path, keep_checksums: bool
) -> Rewritten:
    """Make one altered file in its place below `folder`."""
    original = checkpoint.sources[file].path
    target = folder / file if file else folder
    target.touch()
    copy_patched(original, target, *changes.file_masks(file))
    if file not in changes.edits:
        return Rewritten(tuple(checksum_patches(checkpoint, changes, file)))
    mode = target.stat().st_mode
    target.chmod(mode | 0o200)
    regions = checkpoint.rewrite(target, file, changes.edits[file], keep_checksums)
    target.chmod(mode)
    moved = not checkpoint.rewrites_in_place
    patches = moved_patches(file, original, target, regions) if moved else patches_between(file, original, target)
    return Rewritten(patches, ((file, original.stat().st_size),), moved)


def _refuse_same(checkpoint: Checkpoint, output: Path) -> None:
    mine = [checkpoint.path, *(source.path for source in checkpoint.sources.values())]
    if output.exists() and any(os.path.samefile(output, path) for path in mine):
        raise UsageError(f"{output} is the source itself; give another name, or --in-place")
    if checkpoint.is_directory and checkpoint.path.resolve() in output.resolve().parents:
        raise UsageError(f"{output} lies inside the source; give a place outside {checkpoint.path}")
