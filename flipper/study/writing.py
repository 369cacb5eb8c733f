"""Writing the page of a study; the libraries that draw it are looked for before anything is measured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flipper.checkpoints.output import atomic_output
from flipper.errors import OutputError, UsageError
from flipper.report.writing import NEEDED
from flipper.study.checkpoint import Study


def check_drawable(page: Path) -> None:
    """Raise UsageError when a library is missing, OutputError when there is no folder for the page."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UsageError(f"--report needs {name}, which is not installed; pip install 'flipper-ckpt[report]'")
    if not page.absolute().parent.is_dir() or page.is_dir():
        raise OutputError(f"--report {page}: {'it is a folder' if page.is_dir() else 'there is no such folder'}")


def write_page(study: Study, page: Path) -> None:
    """Write the page, whole or not at all; it replaces what is there. Raises OutputError."""
    from flipper.study.page import html

    with atomic_output(page, force=True) as partial:
        partial.write_text(html(study), "utf-8", errors="backslashreplace")
