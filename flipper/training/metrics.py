"""Metrics as JSON lines, written while training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO

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
                self._file = self._path.open("w", encoding="utf-8")
            except OSError as error:
                raise OutputError(f"can't write {self._path}: {error.strerror}") from error
        line = json.dumps(strict(event), allow_nan=False)
        self._file.write(f"{line}\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
