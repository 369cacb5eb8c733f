"""Trade-off: the page of a sweep over failure rates, as one HTML file that needs nothing else."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flipper.checkpoints.output import atomic_output
from flipper.errors import OutputError, UsageError
from flipper.report.writing import NEEDED

if TYPE_CHECKING:
    from flipper.failstop.sweep import Sweep


def check_page(page: Path) -> None:
    """Before a sweep that takes hours: raise UsageError without a library, OutputError where there is no folder."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UsageError(f"--report needs {name}, which is not installed; pip install 'flipper-ckpt[report]'")
    if not page.absolute().parent.is_dir():
        raise OutputError(f"{page} can't be written: there is no folder {page.parent}")


def write_page(sweep: Sweep, page: Path) -> None:
    """Write the page, in the place of what is there. Raises OutputError when it can't be written."""
    text: str = import_module("flipper.report.trade_off_page").html(sweep)
    with atomic_output(page, force=True) as partial:
        partial.write_text(text, "utf-8")
