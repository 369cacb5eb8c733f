"""Trade-off: the page of a sweep over failure rates, as one HTML file that needs nothing else."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flipper.checkpoints.output import atomic_output, check_target
from flipper.errors import UsageError
from flipper.report.writing import NEEDED

if TYPE_CHECKING:
    from flipper.failstop.sweep import Sweep


def check_page(page: Path) -> None:
    """Before a sweep that takes hours: raise UsageError without a library, OutputError where no page can be written."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UsageError(f"--report needs {name}, which is not installed; pip install 'flipper-ckpt[report]'")
    check_target(page, force=True, directory=False)


def write_page(sweep: Sweep, page: Path) -> None:
    """Write the page, in the place of what is there. Raises OutputError when it can't be written."""
    text: str = import_module("flipper.report.trade_off_page").html(sweep)
    with atomic_output(page, force=True) as partial:
        partial.write_text(text, "utf-8")
