"""Metrics as JSON lines, written while training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO

from flipper.checkpoints.output import writing
from flipper.errors import OutputError
from flipper.strict_json import strict
from flipper.training.spec import Event


class MetricsFile:
    """A file of one event a line, for `with`. It is made at the first event, so a run that is refused leaves none.

    A run that fails later leaves the lines so far: they say how far it came. OutputError when the file exists.
    """

    def __init__(self, path: Path) -> None:
        if path.is_file():
            raise OutputError(f"{path} exists; give --metrics another name or remove it")
        self._path = path
        self._file: IO[str] | None = None

    def write(self, event: Event) -> None:
        """Append one event, in strict JSON, and let readers see it at once."""
        if self._file is None:
            try:
                self._file = self._path.open("w" if self._leads_elsewhere() else "x", encoding="utf-8")
            except OSError as error:
                raise OutputError(f"can't write {self._path}: {error.strerror}") from error
        line = json.dumps(strict(event), allow_nan=False)
        with writing(self._path):
            self._file.write(f"{line}\n")
            self._file.flush()

    def _leads_elsewhere(self) -> bool:
        """Whether it is a pipe, a device or a link, not a file that another run may have made since."""
        return self._path.is_symlink() or (self._path.exists() and not self._path.is_file())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with writing(self._path):  # what could not be written is tried once more
                self._file.close()
