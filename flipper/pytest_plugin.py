"""pytest plugin: the `flip` fixture hands a test altered copies of a checkpoint, to try a loader or a detector on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # every pytest run of a project loads this module, so it imports nothing that takes time
    from flipper.injection.manifest import Manifest

SEED = 0
"""Seed of a draw that is given none, so that a test is struck by the same faults in every run."""


class Flip:
    """Writes altered copies of checkpoints into the temporary folder of one test.

    corrupted = flip("model.pt", bits="exponent", count=3, seed=1)
    """

    def __init__(self, folder: Path, factory: pytest.TempPathFactory) -> None:
        self._folder = folder
        self._factory = factory
        self._manifests: dict[Path, Manifest] = {}

    def __call__(self, checkpoint: str | os.PathLike[str], *, seed: int = SEED, **options: Any) -> Path:
        """The path of an altered copy, which bears the name of the source and lies in a folder of its own.

        checkpoint: a file or directory; it is not touched. options: those of flipper.faults.model.FaultModel.
        Raises FlipperError, also for an option that FaultModel doesn't have.
        """
        from flipper.checkpoints import open_checkpoint
        from flipper.faults.draw import draw
        from flipper.faults.model import FaultModel
        from flipper.injection.inject import inject

        _check_names(options)
        model = FaultModel(**options)
        with open_checkpoint(checkpoint) as source:
            corrupted = self._place(source.path.resolve())
            self._manifests[corrupted] = inject(source, corrupted, draw(source, model, seed))
        return corrupted

    def manifest(self, corrupted: str | os.PathLike[str]) -> Manifest:
        """What was struck in a copy that this fixture made: its `faults` have bits, values before and after, ...

        Raises KeyError for any other path.
        """
        return self._manifests[Path(corrupted)]

    def _place(self, source: Path) -> Path:
        """Where the next copy goes: inside tmp_path, but not inside a source that is tmp_path itself."""
        number = len(self._manifests) + 1
        folder = self._folder / f"flip{number}"
        if source.is_dir() and self._folder.resolve().is_relative_to(source):
            folder = self._factory.mktemp("flip")
        folder.mkdir(exist_ok=True)
        return folder / source.name


def _check_names(options: dict[str, Any]) -> None:
    """Raise UsageError for an option that FaultModel doesn't have; the command line's --layer is `layers` here."""
    from dataclasses import fields
    from difflib import get_close_matches

    from flipper.errors import UsageError
    from flipper.faults.model import FaultModel

    known = [field.name for field in fields(FaultModel)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise UsageError(f"flip() has no option {name}{meant} It takes seed, {', '.join(known)}")


@pytest.fixture
def flip(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Flip:
    """Alter checkpoints by bit flips: flip("model.pt", bits="exponent", count=3, seed=1) is the path of a copy."""
    return Flip(tmp_path, tmp_path_factory)
