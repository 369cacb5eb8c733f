"""Recording: where manifests lie, and the manifest of an injection."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import flipper
from flipper.checkpoints import Checkpoint
from flipper.errors import OutputError, UsageError
from flipper.faults.draw import DRAW
from flipper.faults.plan import FaultPlan
from flipper.injection.changes import Changes
from flipper.injection.manifest import Manifest, Patch, sha256_of, table_file, timestamp
from flipper.injection.table import FaultTable, table_of


@dataclass(frozen=True)
class Record:
    """How an injection is recorded, and what it leaves alone.

    path: of the manifest; None for beside the output. provenance: paths, times and arguments stand in it.
    digests: so do sha256 of source and output. keep_checksums: leave the container's stale. argv: the command line.
    """

    path: Path | None = None
    provenance: bool = True
    digests: bool = False
    keep_checksums: bool = False
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rewritten:
    """What came of files that were rewritten. patches: the bytes that differ; sizes: of these files before.

    moved: whether whole entries moved, so that places in the output are no longer those of the source. The two sides
    of a patch of such a file may differ in length; it has none when they are too long to be recorded.
    """

    patches: tuple[Patch, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    moved: bool = False


def manifest_path(output: Path, number: int = 1) -> Path:
    """OUT.flipper.json, beside the output; of later injections in place OUT.flipper.2.json and so on."""
    output = output if output.name not in ("", "..") else output.resolve()
    return output.with_name(f"{output.name}.flipper.json" if number == 1 else f"{output.name}.flipper.{number}.json")


def stacked_manifests(path: Path) -> list[Path]:
    """The manifests beside a file, oldest first."""
    return [manifest for _, manifest in sorted(_numbered_manifests(path).items())]


def next_manifest(path: Path) -> Path:
    """Where the manifest of the next injection in place goes."""
    return manifest_path(path, max(_numbered_manifests(path), default=0) + 1)


def _numbered_manifests(path: Path) -> dict[int, Path]:
    """The manifests beside a file by number; one in the middle may be gone."""
    first = manifest_path(path)
    stem = re.escape(first.name.removesuffix(".json"))
    named = re.compile(rf"{stem}(?:\.([2-9]|[1-9][0-9]+))?\.json")
    try:
        names = os.listdir(first.parent)
    except OSError:  # a folder may be open to those who know its names only
        names = [first.name] if first.exists() else []
    matches = {name: named.fullmatch(name) for name in names}
    return {int(match[1] or 1): first.with_name(name) for name, match in matches.items() if match}


def free_place(place: Path, force: bool) -> Path:
    """The place of a manifest; raises OutputError when one is there (without `force`)."""
    if place.exists() and not force:
        raise OutputError(f"{place} exists; --force overwrites")
    return place


def refuse_overlap(checkpoint: Checkpoint, place: Path, output: Path | None = None) -> None:
    """Refuse a manifest in the place of the source, of its files or of the output; raises UsageError."""
    mine = [checkpoint.path, *(source.path for source in checkpoint.sources.values())]
    if output is not None:
        mine.append(output)
    for path in mine:
        for file in (place, table_file(place)):
            if os.path.realpath(file) == os.path.realpath(path):
                raise UsageError(f"the manifest can't lie at {file}, which is the checkpoint; give another --manifest")


def checksum_patches(checkpoint: Checkpoint, changes: Changes, file: str) -> Iterator[Patch]:
    """The checksums of a file before and after, run by run."""
    offsets, masks = changes.checksums.get(file, (np.zeros(0, np.int64), np.zeros(0, np.uint8)))
    edges = (np.flatnonzero(np.diff(offsets) != 1) + 1).tolist()
    for first, last in zip([0, *edges], [*edges, len(offsets)], strict=True):
        if first < last:
            before = np.frombuffer(checkpoint.sources[file].read(int(offsets[first]), last - first), np.uint8)
            yield Patch(file, int(offsets[first]), before.tobytes(), (before ^ masks[first:last]).tobytes())


def recorded_table(checkpoint: Checkpoint, changes: Changes, output: Path, place: Path) -> FaultTable:
    """The struck elements as a manifest at `place` names them: files and offsets are those of `output`."""
    table = table_of(checkpoint, changes, [file or os.path.relpath(output, place.parent) for file in changes.files])
    if changes.edits and not checkpoint.rewrites_in_place:  # then entries move
        return replace(table, offset=np.full(len(table), -1, np.int64))
    return table


def manifest_of(
    checkpoint: Checkpoint, plan: FaultPlan, table: FaultTable, output: Path, note: Record, rewritten: Rewritten
) -> Manifest:
    """The manifest of the changes in `table`, made in `output`, whose size and digest come later."""
    digest = sha256_of(checkpoint.path) if note.digests else None
    return Manifest(
        source={
            "path": _shown(checkpoint.path, note),
            "format": checkpoint.format,
            "size": checkpoint.size,
            "sha256": digest,
        },
        output={"path": _shown(output, note), "size": checkpoint.size, "sha256": None},
        table=table,
        seed=plan.seed,
        draw=DRAW if plan.population is not None else None,
        spec=plan.spec,
        population=plan.population,
        strata=tuple(stratum.record() for stratum in plan.strata),
        patches=rewritten.patches,
        drawn=len(plan),
        sizes=dict(rewritten.sizes),
        rewritten=rewritten.moved,
        keep_checksums=note.keep_checksums,
        created=timestamp() if note.provenance else None,
        argv=note.argv if note.provenance else (),
        version=flipper.__version__,
    )


def with_output(manifest: Manifest, checkpoint: Checkpoint, written: Path, note: Record) -> Manifest:
    """The manifest with size and, if wanted, digest of what was written."""
    paths = [written / file if file else written for file in checkpoint.sources]
    size = sum(path.stat().st_size for path in paths)
    digest = sha256_of(written) if note.digests else None
    return replace(manifest, output={**manifest.output, "size": size, "sha256": digest})


def _shown(path: Path, note: Record) -> str:
    return str(path) if note.provenance else path.name
