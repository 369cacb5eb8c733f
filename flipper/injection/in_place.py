"""In place: alter a checkpoint's own files so that a kill at any moment can be undone byte for byte."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flipper.checkpoints import Checkpoint
from flipper.errors import CheckpointError, FlipperError, OutputError, UsageError
from flipper.faults.plan import FaultPlan
from flipper.injection.changes import Changes
from flipper.injection.differences import patches_between
from flipper.injection.manifest import Manifest, Patch, write_manifest
from flipper.injection.patching import copy_patched, patch, write_runs
from flipper.injection.recording import (
    Record,
    Rewritten,
    checksum_patches,
    free_place,
    manifest_of,
    next_manifest,
    recorded_table,
    refuse_overlap,
    with_output,
)
from flipper.injection.scratch import scratch
from flipper.injection.undo import undo
from flipper.shell_words import path_word


def alter_in_place(checkpoint: Checkpoint, plan: FaultPlan, changes: Changes, force: bool, note: Record) -> Manifest:
    """Alter the files of a checkpoint. The manifest serves as journal: it holds the old bytes, and it is on the disk
    before the first of them changes.

    Raises UsageError for links (without `force`), CheckpointError for bytes that have no place to patch, OutputError.
    """
    _refuse_links(checkpoint, changes, force)
    place = free_place(note.path or next_manifest(checkpoint.path), force)
    refuse_overlap(checkpoint, place)
    _check_writable(checkpoint, changes)
    rewritten = _planned(checkpoint, changes, note.keep_checksums)
    table = recorded_table(checkpoint, changes, checkpoint.path, place)
    manifest = manifest_of(checkpoint, plan, table, checkpoint.path, note, rewritten)
    write_manifest(manifest, place, force, sync=True)
    try:
        for file in changes.struck_files:
            _alter(checkpoint, changes, file, rewritten)
        if note.digests or rewritten.sizes:
            manifest = with_output(manifest, checkpoint, checkpoint.path, note)
            write_manifest(manifest, place, force=True, sync=True)
    except OSError as error:
        raise _restored(checkpoint.path, place, error) from error
    except BaseException:  # Ctrl-C, say
        with suppress(FlipperError, OSError):
            undo(checkpoint.path, place)
        raise
    return replace(manifest, path=place)


def _restored(path: Path, place: Path, error: OSError) -> OutputError:
    """The error to raise after the file was put back as it was."""
    cause = error.strerror or str(error)
    try:
        undo(path, place)
    except (FlipperError, OSError):
        command = f"flipper undo {path_word(path)} --manifest {path_word(place)}"
        return OutputError(f"{path}: {cause}; `{command}` restores it")
    return OutputError(f"{path}: {cause}; it is as it was")


def _planned(checkpoint: Checkpoint, changes: Changes, keep_checksums: bool) -> Rewritten:
    """The bytes to change besides those of the elements: checksums, and all that a rewrite changes.

    A rewrite is done to a copy first, and what differs there is what will be patched here.
    """
    patches: list[Patch] = []
    sizes = []
    for file in changes.struck_files:
        if file not in changes.edits:
            patches += checksum_patches(checkpoint, changes, file)
            continue
        original = checkpoint.sources[file].path
        if not checkpoint.rewrites_in_place:
            kind = changes.edits[file][0][0].place.storage
            raise CheckpointError(
                "unsupported-storage", f"{original}: {kind} bytes can't be altered in place; write a copy with -o"
            )
        with scratch(original) as target:
            copy_patched(original, target, *changes.file_masks(file))
            checkpoint.rewrite(target, file, changes.edits[file], keep_checksums)
            patches += patches_between(file, original, target)
        sizes.append((file, original.stat().st_size))
    return Rewritten(tuple(patches), tuple(sizes))


def _alter(checkpoint: Checkpoint, changes: Changes, file: str, rewritten: Rewritten) -> None:
    path = checkpoint.sources[file].path
    if file in changes.edits:
        mine = [patch for patch in rewritten.patches if patch.file == file]
        grown = sum(len(patch.after) - len(patch.before) for patch in mine)
        write_runs(path, [(patch.offset, patch.after) for patch in mine], dict(rewritten.sizes)[file] + grown)
    else:
        patch(path, *changes.file_masks(file), sync=True)


def _check_writable(checkpoint: Checkpoint, changes: Changes) -> None:
    for file in changes.struck_files:
        path = checkpoint.sources[file].path
        try:
            open(path, "r+b").close()
        except OSError as error:
            raise OutputError(f"{path} can't be altered: {error.strerror}") from error


def _refuse_links(checkpoint: Checkpoint, changes: Changes, force: bool) -> None:
    """A link may lead to a blob that others use, so altering it in place needs to be meant."""
    for file in () if force else changes.struck_files:
        path = checkpoint.path / file if file else checkpoint.path
        if path.is_symlink() or checkpoint.path.is_symlink():
            raise UsageError(f"{path} is a symbolic link, others may use what it leads to; --force alters it anyway")
        if (names := path.stat().st_nlink) > 1:
            raise UsageError(f"{path} is one of {names} hard links to the same bytes; --force alters them anyway")
