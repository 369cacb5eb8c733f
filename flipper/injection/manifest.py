"""Manifest: the record of an injection, enough to replay it and to undo it (flipper-manifest/1)."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from flipper.checkpoints.output import atomic_output, writing
from flipper.errors import FlipperError
from flipper.injection.stored_table import table_from_npz, table_from_rows
from flipper.injection.table import FaultTable
from flipper.strict_json import text
from flipper.text_files import read_text

SCHEMA = "flipper-manifest/1"
INLINE = 10_000
"""Rows up to which the faults stand in the manifest itself; more go to an .npz beside it."""


@dataclass(frozen=True)
class Patch:
    """Bytes of a file before and after the injection, beyond those of the rows that have an offset."""

    file: str
    offset: int
    before: bytes
    after: bytes

    def record(self) -> dict[str, Any]:
        """As it stands in the manifest."""
        return {"file": self.file, "offset": self.offset, "before": self.before.hex(), "after": self.after.hex()}


@dataclass(frozen=True)
class Manifest:
    """What was done to a checkpoint. Fields as INTERFACE section 5 names them.

    table: the faults. sizes: of files that were rewritten, before. rewritten: they are archives whose entries moved;
    their patches follow each other in the file, and the two sides of one may differ in length.
    keep_checksums: they were left stale. drawn: faults; several may be one row.
    """

    source: Mapping[str, Any]
    output: Mapping[str, Any]
    table: FaultTable
    seed: int | None = None
    draw: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    population: Mapping[str, Any] | None = None
    strata: tuple[Mapping[str, Any], ...] = ()
    patches: tuple[Patch, ...] = ()
    drawn: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    rewritten: bool = False
    keep_checksums: bool = False
    created: str | None = None
    argv: tuple[str, ...] = ()
    version: str = ""
    path: Path | None = None

    @property
    def faults(self) -> list[dict[str, Any]]:
        """One row a struck element."""
        return list(self.table.rows())

    def summary(self) -> dict[str, Any]:
        """The record that `flipper inject` prints."""
        struck = self.table
        return {
            "output": self.output["path"],
            "manifest": None if self.path is None else str(self.path),
            "format": self.source["format"],
            "seed": self.seed,
            "faults": self.drawn,
            "elements": len(struck),
            "bits_changed": struck.bits_changed,
            "unchanged": struck.unchanged,
            "tensors_struck": len(struck.tensors),
            "population": self.population,
        }

    def document(self) -> dict[str, Any]:
        """All but the faults, ready for JSON."""
        targets = [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in self.table.tensors]
        return {
            "schema": SCHEMA,
            "flipper": self.version,
            "created": self.created,
            "argv": list(self.argv),
            "seed": self.seed,
            "draw": self.draw,
            "source": dict(self.source),
            "output": dict(self.output),
            "spec": dict(self.spec),
            "population": self.population,
            "strata": [dict(stratum) for stratum in self.strata],
            "drawn": self.drawn,
            "targets": targets,
            "sizes": dict(self.sizes),
            "rewritten": self.rewritten,
            "keep_checksums": self.keep_checksums,
            "patches": [patch.record() for patch in self.patches],
        }


def write_manifest(manifest: Manifest, path: Path, force: bool = False, sync: bool = False) -> None:
    """Write the manifest, and the table beside it when it is long; never leaves half of either.

    Raises OutputError when one of them exists (without `force`) or can't be written.
    """
    with manifest_output(path, len(manifest.table), force, sync) as files:
        files.write(manifest, files.write_table(manifest.table))


@dataclass(frozen=True)
class ManifestFiles:
    """The files of a manifest that is being written. place: where it will lie; text: its JSON; table: of a long one."""

    place: Path
    text: Path
    table: Path | None

    def write_table(self, table: FaultTable) -> Any:
        """Write the table if it is long; returns what stands under "faults": its name and digest, else all rows."""
        if self.table is None:
            return list(table.rows())
        name = table_file(self.place)
        with writing(name):
            table.write_npz(self.table)
            return {"file": name.name, "count": len(table), "sha256": sha256_of(self.table)}

    def write(self, manifest: Manifest, faults: Any) -> None:
        """Write the JSON. faults: what write_table returned."""
        document = _text(manifest.document() | {"faults": faults})
        # A name that isn't Unicode holds lone surrogates, whose backslashed form JSON reads as the same.
        self.text.write_text(document, "utf-8", "backslashreplace")


@contextmanager
def manifest_output(path: Path, rows: int, force: bool = False, sync: bool = False) -> Iterator[ManifestFiles]:
    """Fresh files for a manifest of so many rows, which take their places at `path` when the block ends well.

    The table takes its place first, so that no manifest ever stands without it. Errors as of atomic_output.
    """
    former = _table_named_in(path) if force else None
    with atomic_output(path, force, sync=sync) as text:
        if rows <= INLINE:
            yield ManifestFiles(path, text, None)
        else:
            former = None if former == table_file(path) else former
            with atomic_output(table_file(path), force, sync=sync) as table:
                yield ManifestFiles(path, text, table)
    if former is not None:
        former.unlink(missing_ok=True)


def remove_manifest(path: Path) -> None:
    """Remove a manifest, then the table that it names."""
    table = _table_named_in(path)
    path.unlink(missing_ok=True)
    if table is not None:
        table.unlink(missing_ok=True)


def _table_named_in(path: Path) -> Path | None:
    """The table of the manifest at `path`; None if it has none, or is no manifest."""
    if not path.is_file():  # a pipe may never end
        return None
    try:
        document = json.loads(path.read_text("utf-8"))
        named = document["faults"]["file"] if document["schema"] == SCHEMA else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return path.parent / Path(named).name if isinstance(named, str) else None


def _text(document: Mapping[str, Any]) -> str:
    """The document as JSON, one line for each member, and for each row of those that have rows."""
    members = []
    for name, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(map(text, value))
            members.append(f"{text(name)}: [\n  {rows}\n ]")
        else:
            members.append(f"{text(name)}: {text(value)}")
    return "{\n " + ",\n ".join(members) + "\n}\n"


def table_file(path: Path) -> Path:
    """Where the table of a manifest at `path` goes when it is long: OUT.flipper.json -> OUT.flipper.npz."""
    return path.with_name(path.name.removesuffix(".json") + ".npz")


def read_manifest(manifest: str | os.PathLike[str]) -> Manifest:
    """Read a manifest and its table; raises FlipperError when it is none, or its table is missing or altered."""
    path = Path(manifest)
    try:
        document = json.loads(read_text(path))
    except OSError as error:
        raise FlipperError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FlipperError(f"{path} is no manifest: {str(error)[:100]}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise FlipperError(f"{path} is no manifest: its schema is not {SCHEMA}")
    try:
        return _manifest(document, path)
    except FlipperError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        cause = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise FlipperError(f"{path} is a damaged manifest: {cause[:100]}") from error


_KINDS: dict[str, tuple[type, ...]] = {
    "source": (dict,), "output": (dict,), "spec": (dict,), "population": (dict, NoneType), "strata": (list,),
    "drawn": (int,), "seed": (int, NoneType), "draw": (str, NoneType), "sizes": (dict,), "rewritten": (bool,),
    "keep_checksums": (bool,), "created": (str, NoneType), "argv": (list,), "flipper": (str,), "faults": (dict, list),
    "patches": (list,), "targets": (list,),
}  # fmt: skip
"""What a member of the document is."""


def _manifest(document: dict[str, Any], path: Path) -> Manifest:
    for name, kinds in _KINDS.items():
        if type(document[name]) not in kinds:
            raise ValueError(f"{name!r} is {document[name]!r:.40}")
    faults = document["faults"]
    if isinstance(faults, dict):
        table = table_from_npz(_table_bytes(path.parent / Path(faults["file"]).name, faults["sha256"]))
    else:
        table = table_from_rows(faults, {target["name"]: target["shape"] for target in document["targets"]})
    patches = tuple(
        Patch(_inside(row["file"]), _natural(row["offset"]), bytes.fromhex(row["before"]), bytes.fromhex(row["after"]))
        for row in document["patches"]
    )
    document["sizes"] = {_inside(file): _natural(size) for file, size in document["sizes"].items()}
    kept = (
        "source", "output", "seed", "draw", "spec", "population", "drawn", "sizes", "rewritten", "keep_checksums",
        "created",
    )  # fmt: skip
    return Manifest(
        table=table, patches=patches, strata=tuple(document["strata"]), argv=tuple(document["argv"]),
        version=document["flipper"], path=path, **{name: document[name] for name in kept},
    )  # fmt: skip


def _inside(file: str) -> str:
    """The name of a file of the checkpoint: one that leads out of it would let a manifest write anywhere."""
    if os.path.isabs(file) or ".." in Path(file).parts or "\0" in file:
        raise ValueError(f"the file {file!r:.80} is not inside the checkpoint")
    return file


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not a place in a file")
    return value


def _table_bytes(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FlipperError(f"{path}: {error.strerror}; the manifest needs it") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise FlipperError(f"{path} is not the table that the manifest was written with: its sha256 differs")
    return data


def timestamp() -> str:
    """Now in UTC, or the time that SOURCE_DATE_EPOCH names."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(epoch) if epoch.isdecimal() and len(epoch) < 12 else time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def sha256_of(path: Path) -> str:
    """The digest of a file; of a directory, over its files' relative names and digests in name order."""
    if path.is_dir():
        lines = [f"{sha256_of(file)}  {file.relative_to(path).as_posix()}\n" for file in sorted(path.rglob("*"))
                 if file.is_file()]  # fmt: skip
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
